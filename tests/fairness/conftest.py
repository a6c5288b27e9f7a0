"""Property tests run without a deadline: no test is timed."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None, max_examples=40)
settings.load_profile("untimed")
