"""Trainings that save as public scripts do, killed at random moments and resumed by their own code (C).

Each layout is that of a library, written with the standard library alone. ``last``: how many steps the newest
save may be behind at a kill.
"""

import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes.plain import SPEC, Plain

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc"),
    pytest.mark.timeout(400),
]

LOOP = """
import glob, io, json, os, pickle, re, shutil, sys, time, zipfile
OUT, STEPS = sys.argv[1], {steps}
os.makedirs(OUT, exist_ok=True)
def path(name):
    return os.path.join(OUT, name)
def number(name):
    return int(re.findall(r"\\d+", os.path.basename(name.rstrip("/")))[-1])
def newest(pattern):
    return max(glob.glob(path(pattern)), key=number, default=None)
def put(name, data):
    with open(path(name), "wb") as file:
        file.write(data)
def put_zip(name, **state):
    with zipfile.ZipFile(path(name), "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(state, protocol=2))
def from_zip(name):
    with zipfile.ZipFile(path(name)) as file:
        return pickle.loads(file.read("archive/data.pkl"))
{definitions}
step = restore()
print("begins at", step, sorted(os.listdir(OUT)), flush=True)
while step < STEPS:
    step += 1
    time.sleep({pace})
    print("step", step, flush=True)
    if step % {every} == 0:
        save(step)
    {each}
print("done at", step, flush=True)
"""

PICKLE_AND_LOG = """
def restore():
    return pickle.load(open(path("ckpt.pkl"), "rb"))["step"] if os.path.exists(path("ckpt.pkl")) else 0
def save(step):
    put("ckpt.pkl.tmp", pickle.dumps({"step": step}))
    os.replace(path("ckpt.pkl.tmp"), path("ckpt.pkl"))
log = open(path("log.txt"), "a")
"""
BACKUP_FILES = """
def restore():
    return json.load(open(path("meta.json")))["epoch"] if os.path.exists(path("meta.json")) else 0
def save(step):
    put("w.tmp", b"x" * 4096)
    os.replace(path("w.tmp"), path("latest.weights.h5"))
    put("m.tmp", json.dumps({"epoch": step}).encode())
    os.replace(path("m.tmp"), path("meta.json"))
"""
TIMM = """
def restore():
    return from_zip("last.pth.tar")["epoch"] if os.path.exists(path("last.pth.tar")) else 0
def save(step):
    put_zip("tmp.pth.tar", epoch=step)
    os.replace(path("tmp.pth.tar"), path("last.pth.tar"))
    shutil.copy(path("last.pth.tar"), path(f"checkpoint-{step}.pth.tar"))
    if step == 5:
        os.link(path("checkpoint-5.pth.tar"), path("model_best.pth.tar"))
    for old in sorted(glob.glob(path("checkpoint-*")), key=lambda name: number(name[:-8]))[:-2]:
        os.remove(old)
"""
ULTRALYTICS = """
os.makedirs(path("train/weights"), exist_ok=True)
def restore():
    return from_zip("train/weights/last.pt")["epoch"] if os.path.exists(path("train/weights/last.pt")) else 0
def save(step):
    put_zip("train/weights/last.pt", epoch=step)
    if step == 5:
        put_zip("train/weights/best.pt", epoch=step)
csv = open(path("train/results.csv"), "a")
"""
DETECTRON = """
def restore():
    if not os.path.exists(path("last_checkpoint")):
        return 0
    return from_zip(open(path("last_checkpoint")).read().strip())["iteration"]
def save(step):
    put_zip(f"model_{step:07d}.pth", iteration=step)
    put("last_checkpoint", f"model_{step:07d}.pth".encode())
"""
ORBAX = """
def restore():
    found = [name for name in glob.glob(path("[0-9]*")) if os.path.basename(name).isdigit()]
    return max(map(number, found), default=0)
def save(step):
    draft = f"{step}.orbax-checkpoint-tmp-{time.time_ns()}"
    os.makedirs(path(f"{draft}/default/d"))
    put(f"{draft}/default/d/0", b"x" * 100)
    put(f"{draft}/_CHECKPOINT_METADATA", b"{}")
    os.rename(path(draft), path(str(step)))
"""
ACCELERATE = """
def restore():
    found = newest("checkpoint-*")
    return pickle.load(open(os.path.join(found, "optimizer.bin"), "rb"))["step"] if found else 0
def save(step):
    os.makedirs(path(f"checkpoint-{step}/unet"))
    put(f"checkpoint-{step}/unet/config.json", b"{}")
    for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl"):
        put(f"checkpoint-{step}/{name}", pickle.dumps({"step": step}))
"""
TRAINER = """
def restore():
    found = newest("checkpoint-*")
    return json.load(open(os.path.join(found, "trainer_state.json")))["global_step"] if found else 0
def save(step):
    os.makedirs(path(f"checkpoint-{step}"))
    put(f"checkpoint-{step}/optimizer.pt", b"x")
    put(f"checkpoint-{step}/training_args.bin", b"x")
    state = {"global_step": step, "best_model_checkpoint": path("checkpoint-5")}
    put(f"checkpoint-{step}/trainer_state.json", json.dumps(state).encode())
"""
BOOSTER = """
def restore():
    found = newest("model_*.json")
    return json.load(open(found))["rounds"] if found else 0
def save(step):
    put(f"model_{step}.json", json.dumps({"rounds": step}).encode())
"""
LATEST_LINK = """
def restore():
    return json.load(open(path("latest/state.json")))["step"] if os.path.exists(path("latest")) else 0
def save(step):
    os.makedirs(path(f"step_{step}"))
    put(f"step_{step}/state.json", json.dumps({"step": step}).encode())
    if os.path.lexists(path("latest")):
        os.remove(path("latest"))
    os.symlink(f"step_{step}", path("latest"))
"""
JOBLIB = """
def restore():
    found = glob.glob(path("model.joblib"))
    return pickle.load(open(found[0], "rb"))["batches"] if found else 0
def save(step):
    put("model.joblib", pickle.dumps({"batches": step}))
"""
TENSORFLOW = """
def restore():
    if not os.path.exists(path("checkpoint")):
        return 0
    return number(re.findall(r'model_checkpoint_path: "(.*)"', open(path("checkpoint")).read())[0])
def save(step):
    put(f"ckpt-{step}.data-00000-of-00001", b"x" * 100)
    put(f"ckpt-{step}.index", b"x")
    put("checkpoint", f'model_checkpoint_path: "ckpt-{step}"\\n'.encode())
"""


def script(definitions, *, each="pass", steps=60, every=5, pace=0.2):
    """A complete training."""
    return LOOP.format(definitions=definitions, each=each, steps=steps, every=every, pace=pace)


@pytest.fixture
def plain(tmp_path):
    """Make a run; processes that it leaves are killed."""
    made = []

    def make(text, **options):
        made.append(Plain(tmp_path, text, python=sys.executable, **options))
        return made[-1]

    yield make
    for run in made:
        run.close()


LAYOUTS = {
    "pickle-and-log": (script(PICKLE_AND_LOG, each='log.write("x\\n"); log.flush()'), 5),
    "backup-files": (script(BACKUP_FILES), 5),
    "timm": (script(TIMM), 5),
    "ultralytics": (script(ULTRALYTICS, each='csv.write("1,2\\n"); csv.flush()'), 5),
    "detectron": (script(DETECTRON), 5),
    "accelerate": (script(ACCELERATE), 5),
    "trainer": (script(TRAINER), 5),
    # The formats below do not show where a file ends, so there must have been no write for 5 s.
    "orbax": (script(ORBAX), 35),
    "booster": (script(BOOSTER), 35),
    "latest-link": (script(LATEST_LINK, every=40, steps=90), 50),
    "joblib": (script(JOBLIB, every=40, steps=90), 50),
    "tensorflow": (script(TENSORFLOW), 5),
}
"""The training of each layout, and how many steps its newest save may be behind."""


def interrupted(folder, name):
    """Kill the training of a layout, and let the next attempt end: the two steps, and both outputs."""
    text, last = LAYOUTS[name]
    run = Plain(folder, text, python=sys.executable)
    try:
        run.start()
        at = random.Random(name).randint(42, 50) if last < 50 else 75
        run.until(rf"step {at}\b")
        return run.kill(), run.start().begins(), run.said(1), run.over()
    finally:
        run.close()


@pytest.fixture(scope="module")
def played(request, tmp_path_factory):
    """The trainings of the selected layouts, four at a time, since they mostly wait."""
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    names = [item.callspec.params["name"] for item in here]
    with ThreadPoolExecutor(4) as pool:
        yield {name: pool.submit(interrupted, tmp_path_factory.mktemp("plain"), name) for name in names}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", LAYOUTS)
def test_killed_at_a_random_moment_it_resumes_from_its_newest_whole_save(played, name):
    """The next attempt resumes there by its own code, and continues to the end (C)."""
    killed, begins, first, second = played[name].result()

    assert killed - LAYOUTS[name][1] <= begins <= killed, (killed, begins, first)
    assert "done at" in second, second


def test_what_a_lost_machine_had_saved_before_is_in_the_store(plain):
    """No final snapshot of the folder: two files, renamed every second, and a log beside them (C2, C21)."""
    text = script(
        BACKUP_FILES + 'log = open(path("train.log"), "a")', each='log.write("x"); log.flush()', steps=200
    )
    run = plain(text).start()
    saved = run.until_saved(step=20)
    run.lose()

    begins = run.start().begins()

    assert {item.path for item in saved.files} == {"latest.weights.h5", "meta.json"}
    assert begins >= 20


def test_links_and_best_and_last_are_there_again(plain):
    """``latest`` is a link that the next save can move; an old best is kept beside the last one (C)."""
    run = plain(script(LATEST_LINK, every=40, steps=90)).start()
    run.until(r"step 75\b")
    run.kill()

    assert run.start().begins() == 40
    run.over()
    assert run.saved()[0].links == {"latest": "step_80"}


def test_the_best_of_long_ago_comes_back_with_the_last(plain):
    """And the checkpoint folder has the same path in both attempts (C3, C4)."""
    run = plain(script(TIMM + "\nprint('saves to', os.path.realpath(OUT))")).start()
    run.until(r"step 42\b")
    run.kill()
    run.start().begins()

    assert "model_best.pth.tar" in re.search(r"begins at .*", run.said())[0]
    places = [re.search(r"saves to (.*)", run.said(attempt))[1] for attempt in (1, 2)]
    assert places[0] == places[1]


def test_the_step_of_a_checkpoint_is_that_of_the_last_and_not_of_the_best(plain):
    """The best one's name has 20, ``last`` is of 40 (C4)."""
    best = """
save_last = save
def save(step):
    save_last(step)
    if step == 20:
        put_zip("epoch=1-step=20.ckpt", step=20)
"""
    run = plain(script(ULTRALYTICS + best, every=20, steps=100)).start()
    run.until(r"step 47\b")
    run.kill()

    assert run.saved()[0].step == 40
    assert run.start().begins() == 40


def test_a_training_that_saves_elsewhere_is_told_so_in_its_log(plain):
    """Log and status name the folder; the run continues (C) (feature C8)."""
    run = plain(script("def restore(): return 0\ndef save(step): pass", steps=400), spec=SPEC).start()

    said = run.until(r"\[envscaler\] no checkpoint after")

    assert "has no files; does the training save there?" in said
