"""How attempts end and what follows, as frozen."""

from golden.files import REVIEW, stored
from golden.outcomes import golden_files


def test_every_end_is_judged_as_it_was():
    """Each reason of a node, each pair of nodes, and the next action after each outcome."""
    for path, text in golden_files().items():
        assert text == stored(path), REVIEW
