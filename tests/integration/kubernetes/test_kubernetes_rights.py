"""The rights that the Role must grant, verb by verb."""

from dataclasses import replace

import pytest
from integration.kubernetes.rig import OFFER, over, request_for, running, with_claim

from envscaler_airflow.backends.kubernetes.job_reader import View
from envscaler_airflow.backends.kubernetes.security import rbac
from envscaler_airflow.errors import BackendError, CapacityError, EnvScalerError
from envscaler_airflow.planning.offers import Allocation

NEEDED = [
    ("batch", "jobs", "create"),
    ("batch", "jobs", "get"),
    ("batch", "jobs", "patch"),
    ("batch", "jobs", "delete"),
    ("batch", "jobs", "list"),
    ("", "persistentvolumeclaims", "create"),
    ("", "persistentvolumeclaims", "patch"),
    ("", "pods", "list"),
    ("", "pods", "delete"),
    ("", "configmaps", "create"),
    ("", "secrets", "create"),
    ("", "nodes", "list"),
]


WATCHED = [("batch", "jobs", "watch"), ("", "pods", "watch")]
"""The additional rights of a triggerer."""


OPTIONAL = [
    ("", "events", "list"),
    ("", "nodes", "get"),
    ("", "pods/resize", "patch"),
    ("", "pods/status", "patch"),
    ("storage.k8s.io", "csidrivers", "get"),
]
"""The optional rights of the Role's comments; listing pods of the whole cluster is tested apart."""


def without(*missing):
    """The shipped rules without some verbs; each rule of one resource."""
    found = []
    for document in rbac("default"):
        for rule in document.get("rules", ()):
            for one in rule["resources"]:
                left = [verb for verb in rule["verbs"] if (rule["apiGroups"][0], one, verb) not in missing]
                found.append({**rule, "resources": [one], "verbs": left})
    return found


def life(backend):
    """Everything that an owner does with an attempt."""
    backend.offers()
    spec = with_claim(retain="run")
    request = request_for(spec=spec)
    handle = backend.submit(request)
    running(backend, handle)
    backend.stop(handle, grace_s=5)
    assert over(backend, handle) == [("ended", "stopped")]
    backend.release(handle)
    list(backend.attempts())
    backend.stop(backend.submit(request_for(attempt=4, spec=spec)), grace_s=0)
    running(backend, backend.submit(request_for(attempt=2, **MOST)))
    with pytest.raises(CapacityError):
        backend.submit(request_for(attempt=3, **MOST))


MOST = {
    "spec": {"resources": {"requests": {"cpu": "5"}}},
    "allocation": Allocation(replace(OFFER, vcpus=8.0)),
}
"""More than half of the node."""


def test_the_rights_that_are_shipped_are_enough(cluster, connect):
    """The whole life of an attempt."""
    life(connect(token=cluster.user("runner", without())))


def test_every_verb_of_the_role_is_one_that_something_needs():
    """The smallest Role: it grants nothing unnecessary."""
    granted = {
        (rule["apiGroups"][0], one, verb)
        for document in rbac("default")
        for rule in document.get("rules", ())
        for one in rule["resources"]
        for verb in rule["verbs"]
    }

    assert granted == {*NEEDED, *WATCHED, *OPTIONAL}


@pytest.mark.parametrize("missing", NEEDED, ids="-".join)
def test_with_one_verb_less_the_message_names_it(cluster, connect, missing):
    """The message tells the cluster's administrator what to grant."""
    _, resource, verb = missing
    token = cluster.user("runner", without(missing))

    with pytest.raises(EnvScalerError, match=f'cannot {verb} resource "{resource}"'):
        life(connect(token=token))


@pytest.mark.parametrize("missing", WATCHED, ids="-".join)
def test_a_watch_that_is_not_granted_is_named(cluster, connect, missing):
    """The list is still shown for two minutes; then the message names what is missing."""
    _, resource, verb = missing
    backend, now = connect(token=cluster.user("runner", without(missing))), [0.0]
    view = View(backend.cluster, "default", monotonic=lambda: now[0])
    for name in ("jobs", "pods"):
        view._list(name, view._tables[name])
    with pytest.raises(BackendError, match=f'cannot {verb} resource "{resource}"') as caught:
        view.round(resource)
    view._problem, now[0] = str(caught.value), 121.0

    with pytest.raises(BackendError, match=f'cannot {verb} resource "{resource}"'):
        view.attempt("any")


def test_what_may_be_left_out_is_not_needed(cluster, connect):
    """Events, nodes by name, resizes, and freeing pods of silent nodes."""
    life(connect(token=cluster.user("runner", without(*OPTIONAL))))
