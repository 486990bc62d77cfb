"""XGBoost with its own TrainingCheckPoint: ``model_N.ubj`` after every fifth round."""

import glob
import os
import re
import sys
import time

import numpy as np
import xgboost

folder, rounds = sys.argv[1], 120
os.makedirs(folder, exist_ok=True)


class Printer(xgboost.callback.TrainingCallback):
    """Output of ``verbose_eval``, and a delay."""

    def after_iteration(self, model, epoch, evals_log):
        """Count."""
        time.sleep(pace)
        print("step", model.num_boosted_rounds(), flush=True)
        return False


features = np.random.default_rng(1).normal(size=(64, 8))
data = xgboost.DMatrix(features, features.sum(axis=1))
found = glob.glob(os.path.join(folder, "model_*.ubj"))
found.sort(key=lambda name: int(re.findall(r"\d+", name)[-1]))
before = xgboost.Booster(model_file=found[-1]) if found else None
begins = before.num_boosted_rounds() if before else 0
print("begins at", begins, flush=True)
pace = 0.0 if begins else 0.2  # slow until it is killed
model = xgboost.train(
    {"nthread": 1, "seed": 1, "max_depth": 2},
    data,
    num_boost_round=rounds - begins,
    xgb_model=before,
    callbacks=[Printer(), xgboost.callback.TrainingCheckPoint(folder, interval=5)],
)
learnt = float(model.predict(data).sum())
print(f"done at {model.num_boosted_rounds()} with {learnt}")
