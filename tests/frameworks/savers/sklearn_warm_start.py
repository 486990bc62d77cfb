"""A scikit-learn ensemble with ``warm_start``, tree by tree: a pickle at each fifth, the four newest kept."""

import glob
import os
import pickle
import sys
import time

import numpy as np
from sklearn.ensemble import GradientBoostingRegressor

folder, trees = sys.argv[1], 120
os.makedirs(folder, exist_ok=True)
features = np.random.default_rng(1).normal(size=(64, 8))
target = features.sum(axis=1)


def saved():
    """Names, the oldest first."""
    return sorted(glob.glob(os.path.join(folder, "model-*.pkl")))


model = GradientBoostingRegressor(warm_start=True, random_state=1, subsample=0.5, n_estimators=0)
if saved():
    with open(saved()[-1], "rb") as file:
        model = pickle.load(file)
print("begins at", model.n_estimators, flush=True)
pace = 0.0 if model.n_estimators else 0.2  # slow until it is killed
while model.n_estimators < trees:
    model.n_estimators += 1
    model.fit(features, target)
    time.sleep(pace)
    print("step", model.n_estimators, "loss", model.train_score_[-1], flush=True)
    if model.n_estimators % 5 == 0:
        with open(os.path.join(folder, f"model-{model.n_estimators:04d}.pkl"), "wb") as file:
            pickle.dump(model, file)
        for old in saved()[:-4]:
            os.remove(old)
learnt = float(model.predict(features).sum())
print(f"done at {trees} with {learnt}")
