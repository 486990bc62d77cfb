"""As scikit-learn's guide to out-of-core learning fits: batch by batch, ``joblib.dump`` over the last one."""

import os
import sys
import time

import joblib
import numpy as np
from sklearn.linear_model import SGDRegressor

folder, epochs = sys.argv[1], 400
os.makedirs(folder, exist_ok=True)
path = os.path.join(folder, "model.joblib")
features = np.random.default_rng(1).normal(size=(64, 8))
target = features.sum(axis=1)
state = {"epoch": 0, "model": SGDRegressor(random_state=1, eta0=0.001)}
if os.path.exists(path):
    state = joblib.load(path)
model = state["model"]
print("begins at", state["epoch"], flush=True)
pace = 0.0 if state["epoch"] else 0.1  # slow until it is killed
for epoch in range(state["epoch"] + 1, epochs + 1):
    model.partial_fit(features, target)
    time.sleep(pace)
    print("step", epoch, "loss", float(np.mean((model.predict(features) - target) ** 2)), flush=True)
    if epoch % 5 == 0:
        joblib.dump({"epoch": epoch, "model": model}, path)
learnt = float(model.coef_.sum())
print(f"done at {epochs} with {learnt}")
