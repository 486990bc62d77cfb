"""Unit tests of stall detection: times of steps in, a verdict out."""

from envscaler_agent.progress import StallWatch


def stepping(watch, *, every_s, count, start=0.0, first=1):
    """Let *count* steps happen and return the time of the last."""
    now = start
    for number in range(count):
        now = start + number * every_s
        watch.observe(now, step=first + number)
    return now


def test_stalls_after_ten_times_the_usual_step():
    """Steps of 60 s: 600 s of silence are allowed, 601 are not."""
    watch = StallWatch(10, 300)
    last = stepping(watch, every_s=60, count=5)

    assert not watch.is_stalled(last + 600)
    assert watch.is_stalled(last + 601)


def test_short_steps_have_the_least_leash():
    """Steps of 0.1 s: 300 s are allowed, not one second."""
    watch = StallWatch(10, 300)
    last = stepping(watch, every_s=0.1, count=5)

    assert not watch.is_stalled(last + 300)
    assert watch.is_stalled(last + 301)


def test_never_before_the_first_step():
    """Loading a model may take any time, also when a restored step number is known."""
    watch = StallWatch(10, 300)

    watch.observe(0, step=None)
    watch.observe(1, step=4200)

    assert not watch.is_stalled(1e6)
    assert watch.silent_s(1e6) is None


def test_one_slow_step_does_not_change_the_usual():
    """The median of 1, 1, 1, 50 is 1."""
    watch = StallWatch(10, 0)
    last = stepping(watch, every_s=1, count=4)
    watch.observe(last + 50, step=5)

    assert watch.allowed_s() == 10


def test_evaluation_and_saving_get_a_longer_leash():
    """Six times as long, and the next step has its full time afterwards."""
    watch = StallWatch(10, 300)
    last = stepping(watch, every_s=60, count=5)

    watch.observe(last + 1, step=5, phase="evaluation")
    assert not watch.is_stalled(last + 3600)
    assert watch.is_stalled(last + 3601)

    watch.observe(last + 3000, step=5, phase="training")
    assert not watch.is_stalled(last + 3600)
    assert watch.is_stalled(last + 3601)


def test_the_time_of_an_evaluation_is_no_step_time():
    """A step that ends an evaluation of an hour does not make the usual step an hour."""
    watch = StallWatch(10, 0)
    last = stepping(watch, every_s=1, count=5)
    watch.observe(last, step=5, phase="evaluation")
    watch.observe(last + 3600, step=6, phase="training")

    assert watch.allowed_s() == 10


def test_many_steps_between_two_looks_share_the_time():
    """100 steps in 10 s are steps of 0.1 s."""
    watch = StallWatch(10, 0)
    watch.observe(0, step=0)
    watch.observe(10, step=100)
    watch.observe(20, step=200)

    assert watch.allowed_s() == 1
