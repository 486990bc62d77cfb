"""Composition: order, rules, references."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envscaler_airflow.envspec import load_spec, load_with_sources
from envscaler_airflow.envspec.compose import merge, prune
from envscaler_airflow.envspec.documents import Node, node_of
from envscaler_airflow.errors import SpecError

HEAD = "version: v1\nname: s\n"


def write(folder, text, name="spec.yaml"):
    """*text* as a file in *folder*."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def faults_of(path, **arguments):
    """Faults from loading *path*, without the folder."""
    with pytest.raises(SpecError) as caught:
        load_spec(path, **arguments)
    return [fault.replace(f"{path.parent}/", "") for fault in caught.value.faults]


def merged(*bodies):
    """Plain bodies merged, lowest first."""
    nodes = [node_of(body, Node(None)) for body in bodies]
    result = nodes[0]
    for node in nodes[1:]:
        result = merge(result, node)
    return prune(result).plain()


@pytest.mark.parametrize(
    ("below", "above", "result"),
    [
        ({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}}, {"a": {"x": 1, "y": 3}}),
        ({"system_packages": ["git", "wget"]}, {"system_packages": ["tmux", "git"]},
         {"system_packages": ["git", "wget", "tmux"]}),
        ({"entrypoint": ["a", "b"]}, {"entrypoint": ["c"]}, {"entrypoint": ["c"]}),
        ({"a": {"x": 1}}, {"a": 2}, {"a": 2}),
        ({"a": {"x": 1}, "b": 1}, {"a": None}, {"b": 1}),
        ({"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
         {"env": [{"name": "A", "value_from": "env:A"}]},
         {"env": [{"name": "A", "value_from": "env:A"}, {"name": "B", "value": "2"}]}),
        ({"volumes": [{"name": "d", "source": "s3://a", "mount_path": "/d"}]},
         {"volumes": [{"name": "d", "source": "s3://b"}]},
         {"volumes": [{"name": "d", "source": "s3://b", "mount_path": "/d"}]}),
        ({"runtimes": [{"type": "python", "packages": ["a"]}]},
         {"runtimes": [{"type": "python", "packages": ["b"], "version": "3.11"}]},
         {"runtimes": [{"type": "python", "packages": ["a", "b"], "version": "3.11"}]}),
    ],
)  # fmt: skip
def test_the_merge_rules(below, above, result):
    """Maps merge, unions and named lists join, the rest replaces, null removes."""
    assert merged(below, above) == result


plain = st.recursive(
    st.one_of(st.none(), st.integers(0, 3)),
    lambda items: st.one_of(
        st.dictionaries(st.sampled_from(["a", "b", "system_packages", "volumes"]), items, max_size=3),
        st.lists(items, max_size=3, unique_by=repr),
    ),
    max_leaves=8,
)
bodies = st.dictionaries(st.sampled_from(["a", "b", "system_packages", "env"]), plain, max_size=3)


@settings(max_examples=200)
@given(bodies, bodies, bodies)
def test_merging_is_associative(first, second, third):
    """Grouping does not matter, also where null and a change of type come between."""
    one, two, three = (node_of(body, Node(None)) for body in (first, second, third))

    left = merge(merge(one, two), three)
    right = merge(one, merge(two, three))

    assert prune(left).plain() == prune(right).plain()


def test_bases_modules_and_the_document_stack_in_this_order(tmp_path):
    """extends, then modules, then the document; each value knows its source."""
    write(tmp_path, "num_nodes: 1\ncapacity: spot\nsystem_packages: [git]\n", "m/base.yaml")
    write(tmp_path, "num_nodes: 2\nsystem_packages: [tmux]\n", "m/module.yaml")
    path = write(
        tmp_path, HEAD + "extends: [./m/base.yaml]\nmodules: [m/module.yaml]\nsystem_packages: [git, htop]\n"
    )

    loaded = load_with_sources(path)

    assert loaded.spec.num_nodes.min == 2
    assert loaded.spec.capacity == "spot"
    assert loaded.spec.system_packages == ("git", "tmux", "htop")
    assert loaded.sources["num_nodes"] == f"{tmp_path}/m/module.yaml:1"
    assert loaded.sources["system_packages[2]"] == f"{path}:5"


def test_relative_paths_are_relative_to_the_file_that_names_them(tmp_path):
    """A module's requirements are beside the module, and are shown as written."""
    write(tmp_path, "runtimes: [{requirements: reqs.txt}]\n", "m/module.yaml")
    path = write(tmp_path, HEAD + "modules: [m/module.yaml]\nworkdir: ./src\n")

    spec = load_spec(path)

    assert spec.runtimes[0].requirements == "reqs.txt"
    assert spec.resolve_path("runtimes[0].requirements") == tmp_path / "m" / "reqs.txt"
    assert spec.resolve_path("workdir") == tmp_path / "src"


def test_a_fault_in_a_module_names_the_module(tmp_path):
    """Not the file that uses it."""
    write(tmp_path, "resources:\n  requests: {memory: 12}\n", "m.yaml")
    path = write(tmp_path, HEAD + "modules: [m.yaml]\n")

    assert faults_of(path) == ["m.yaml:2: resources.requests.memory: 12 has no unit; write 12Gi or 12Mi"]


def test_a_circle_is_found_and_shown(tmp_path):
    """One extends the other, which extends the first."""
    write(tmp_path, "extends: [a.yaml]\n", "b.yaml")
    path = write(tmp_path, HEAD + "extends: [b.yaml]\n", "a.yaml")

    assert "goes in a circle: a.yaml -> b.yaml -> a.yaml" in faults_of(path)[0]


@pytest.mark.parametrize(
    "reference",
    [
        "../x.yaml",
        "/etc/passwd",
        "~/x.yaml",
        "a/../../x.yaml",
        "m/../m.yaml",
        "https://h/x.yaml",
        "{{ parameters.x }}.yaml",
        "none.yaml",
    ],
)
def test_references_that_leave_the_folder_or_name_nothing_are_refused(tmp_path, reference):
    """One fault each, with the reference."""
    write(tmp_path, "num_nodes: 2\n", "x.yaml")
    write(tmp_path, "num_nodes: 2\n", "in/m.yaml")
    (tmp_path / "in" / "m").mkdir()
    path = write(tmp_path, HEAD + f'modules: ["{reference}"]\n', "in/spec.yaml")

    assert len(faults_of(path)) == 1


def test_a_link_that_leads_out_of_the_folder_is_refused(tmp_path):
    """The name is valid, its place is not."""
    write(tmp_path, "num_nodes: 2\n", "x.yaml")
    path = write(tmp_path, HEAD + "modules: [m.yaml]\n", "in/spec.yaml")
    (tmp_path / "in" / "m.yaml").symlink_to(tmp_path / "x.yaml")

    assert "leads out of the spec's folder" in faults_of(path)[0]


def test_registry_references_need_a_registry(tmp_path):
    """First none is configured; then one is."""
    module = write(tmp_path, "num_nodes: 2\n", "cache/m.yaml")
    path = write(tmp_path, HEAD + "extends: [registry://team/m@1.2]\n")

    assert "no registry is configured" in faults_of(path)[0]
    assert load_spec(path, registry=lambda _: module).num_nodes.min == 2


def test_an_error_of_the_registry_is_a_fault_at_the_reference(tmp_path):
    """The registry names the reason, and we name the place."""

    def registry(reference):
        raise SpecError(f"{reference}: no such version; write 1.1")

    path = write(tmp_path, HEAD + "extends: [registry://team/m@1.2]\n")

    assert faults_of(path, registry=registry) == [
        "spec.yaml:3: extends[0]: registry://team/m@1.2: no such version; write 1.1"
    ]


def test_a_whole_spec_may_come_from_the_registry(tmp_path):
    """As the operator passes it on."""
    path = write(tmp_path, HEAD)

    assert load_spec("registry://team/s@1.0", registry=lambda _: path).name == "s"
