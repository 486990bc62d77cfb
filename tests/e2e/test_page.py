"""The page inside a running Airflow, in a real browser.

``ENVSCALER_PICTURE=docs/images/training-page.png`` lets the stage be moved and keeps a picture of its page.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support import expected_conditions as until
from selenium.webdriver.support.ui import WebDriverWait

from envscaler_airflow.testing.airflow_services import AirflowServices

if TYPE_CHECKING:
    from e2e.conftest import StageRun

PICTURE = os.environ.get("ENVSCALER_PICTURE")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--window-size=1500,1100",
)
TAB = "Training"

pytestmark = pytest.mark.skipif(
    not os.environ.get("CI") and shutil.which("chromedriver") is None,
    reason="needs chromium and chromedriver",
)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    """A browser with a profile of its own."""
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


class Tab:
    """The tab of one task instance."""

    def __init__(self, browser: webdriver.Chrome, run: StageRun) -> None:
        """Open the task instance as a user does, and its tab."""
        self.browser = browser
        self.wait = WebDriverWait(browser, 60)
        path = f"/dags/{run.dag_id}/runs/{quote(run.run_id, safe='')}/tasks/train"
        browser.get(run.airflow.url + path)
        self.wait.until(until.element_to_be_clickable((By.LINK_TEXT, TAB))).click()

    def text(self, words: str) -> str:
        """Text of the page, once it contains *words*."""
        self.browser.switch_to.default_content()
        frame = self.wait.until(
            until.presence_of_element_located((By.CSS_SELECTOR, f"iframe[title='{TAB}']"))
        )
        self.browser.switch_to.frame(frame)
        self.wait.until(until.text_to_be_present_in_element((By.TAG_NAME, "body"), words))
        return self.browser.find_element(By.TAG_NAME, "body").text


def test_a_person_follows_a_stage_to_its_end(browser: webdriver.Chrome, begin: Callable):
    """The task has a tab, during the run and after it; nothing is refused or missing (feature E4)."""
    steps = 560 if PICTURE else 60
    run = begin("scaled" if PICTURE else "stage", steps=steps, pause=0.25)
    run.wait_step(3)

    tab = Tab(browser, run)
    live = tab.text("Training: active")
    run.wait_end(timeout_s=200)
    over = tab.text("Training: succeeded")  # the page refreshes itself

    assert "local/cpu-1" in live
    assert f"{steps} of {steps}" in over
    assert "0 to " in over
    assert "compute $" in over
    assert (
        len(browser.find_elements(By.CSS_SELECTOR, "svg[aria-label='Allocation over time'] rect.good")) == 1
    )
    assert len(browser.find_elements(By.CSS_SELECTOR, "polyline.rate")) >= 1
    refused = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert [message for message in refused if "/envscaler/" in message] == []
    if PICTURE:
        browser.switch_to.default_content()
        browser.save_screenshot(PICTURE)


def test_the_page_is_dark_where_the_reader_is(browser: webdriver.Chrome, finished: StageRun):
    """The page follows the browser's preference."""
    query = f"run_id={quote(finished.run_id)}&task_id=train"
    address = f"{finished.airflow.url}/envscaler/dags/stage/training?{query}"
    seen = []
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        browser.get(address)
        seen.append(browser.find_element(By.TAG_NAME, "body").value_of_css_property("background-color"))

    assert seen == ["rgba(255, 255, 255, 1)", "rgba(18, 22, 29, 1)"]


def test_a_task_that_does_not_train_says_so(finished: StageRun):
    """Every task has the tab; for a task that is not a stage it shows no run."""
    address = f"{finished.airflow.url}/envscaler/dags/stage/training"

    answer = httpx.get(address, params={"run_id": finished.run_id, "task_id": "other"})

    assert answer.status_code == 404
    assert "No training has begun here" in answer.text


def test_the_page_follows_a_stage_to_its_own_store(begin: Callable, airflow: AirflowServices):
    """The store of the task's connection, which only the database knows."""
    url = str(airflow.home / "elsewhere")
    extra = json.dumps({"store_url": url})
    body = {"connection_id": "elsewhere", "conn_type": "envscaler_store", "extra": extra}
    airflow.call("POST", "/connections", body=body)
    run = begin("elsewhere", steps=1)
    run.wait_end()

    address = f"{run.airflow.url}/envscaler/dags/elsewhere/training"
    answer = httpx.get(address, params={"run_id": run.run_id, "task_id": "train"})

    assert answer.status_code == 200, answer.text
    assert "Training: succeeded" in answer.text
    assert f"file://{url}/" in answer.text
