"""The example DAGs load, and their specs too."""

from pathlib import Path

import pytest

from envscaler_airflow.envspec import load_spec
from envscaler_airflow.launch import batches

EXAMPLES = Path(__file__).parents[3] / "dags/examples"


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Airflow's own, which reads .airflowignore
def test_every_example_dag_loads():
    """No import fails; the trainings beside them are not DAGs, and may import other packages (feature E7)."""
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(str(EXAMPLES))

    assert bag.import_errors == {}
    assert sorted(bag.dags["elastic_torch"].task_ids) == ["autoscale", "train"]
    assert "retrain_text_classifier" in bag.dags


@pytest.mark.parametrize("path", sorted((EXAMPLES / "envs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_spec_loads_and_names_what_is_there(path):
    """Its workdir and, where it has one, the script that it runs."""
    inputs = {name: f"file:///{name}" for name in load_spec(path).input_names}
    spec = load_spec(path, inputs=inputs)

    folder = spec.resolve_path("workdir")
    scripts = [word for word in spec.entrypoint if word.endswith(".py")]
    assert folder is not None
    assert scripts
    assert all((Path(folder) / script).is_file() for script in scripts)


def test_one_worker_makes_the_batch_of_two_by_two_passes():
    """32 samples: 2 passes of 16, or one pass on each of two."""
    found = batches(load_spec(EXAMPLES / "envs/elastic_torch.yaml"))

    assert [(each.nodes, each.micro, each.accumulation) for each in found] == [(1, 16, 2), (2, 16, 1)]
