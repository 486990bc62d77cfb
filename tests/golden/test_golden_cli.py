"""The command line as its help shows it."""

from golden.cli_help import golden_files
from golden.files import REVIEW, stored


def test_every_command_has_the_help_that_was_frozen():
    """Commands, options, defaults and texts (feature A9)."""
    for path, text in golden_files().items():
        assert text == stored(path), REVIEW
