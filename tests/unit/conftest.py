"""For all unit tests: no limit on the time of an example, since the machine may be busy."""

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
