"""Take pictures of the dashboard with a headless Chromium, for a README."""

from __future__ import annotations

import base64
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from archipelago.broker.errors import ConfigError

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
#: Theme, width and largest height in CSS pixels.
PICTURES = {"dash-light": ("light", 1440, 4000), "dash-dark": ("dark", 1440, 4000), "dash-phone": ("light", 390, 1900)}
READY = "return !!document.querySelector('.chart .main-svg, .chart .nothing')"
WAIT_SECONDS = 30.0


def take(address: str, token: str, folder: Path, stopped: Callable[[], bool]) -> list[Path]:
    """Write dash-light.png, dash-dark.png and dash-phone.png of the page at that address. Raise ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)  # Fail before a browser is started.
    except OSError as error:
        raise _unwritable(folder, error) from None
    out = []
    with browser() as driver:
        for name, (theme, width, height_most) in PICTURES.items():
            path = folder / f"{name}.png"
            whole = f"{address}/?still&theme={theme}#token={quote(token)}"
            _write(path, picture(driver, whole, width, height_most, stopped))
            out.append(path)
    return out


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be written ({error.strerror})", "Name another folder.", code="config.file")


def picture(driver: WebDriver, address: str, width: int, height_most: int, stopped: Callable[[], bool]) -> bytes:
    """Return the page as a PNG, with two pixels for each CSS pixel."""
    metrics: dict[str, Any] = {"width": width, "height": 900, "deviceScaleFactor": 2, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    driver.get("about:blank")  # Else an address that differs only behind the # would not load again.
    driver.get(address)
    deadline = time.monotonic() + WAIT_SECONDS
    while not driver.execute_script(READY) and not stopped():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"the page drew nothing for {WAIT_SECONDS:.0f} s", "Open the page to see why.", code="config.no-browser"
            )
        time.sleep(0.05)
    height = min(height_most, int(driver.execute_script("return document.documentElement.scrollHeight")))
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**metrics, "height": height})
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    return base64.b64decode(shot["data"])


@contextmanager
def browser() -> Iterator[WebDriver]:
    """Start a headless Chromium that only contacts us. Raise ConfigError if there is none."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    service = shutil.which("chromedriver")
    if program is None or service is None:
        missing = "Chromium" if program is None else "chromedriver"
        raise ConfigError(
            f"there is no {missing} on this machine", "Install chromium and chromium-driver.", code="config.no-browser"
        )
    try:
        from selenium import webdriver
        from selenium.common.exceptions import WebDriverException
    except ImportError:
        raise ConfigError("selenium is not installed", "Run: pip install selenium.", code="config.no-browser") from None
    options = webdriver.ChromeOptions()
    options.binary_location = program
    with tempfile.TemporaryDirectory(prefix="dash-") as profile:
        for argument in (
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-dev-shm-usage", f"--user-data-dir={profile}",
        ):  # fmt: skip
            options.add_argument(argument)
        try:
            driver = webdriver.Chrome(options, webdriver.ChromeService(service))
        except WebDriverException as error:
            reason = (error.msg or "").splitlines()[:1]
            raise ConfigError(
                f"{program} does not start ({' '.join(reason)})", "Try to start it yourself.", code="config.no-browser"
            ) from None
        try:
            yield driver
        finally:
            driver.quit()
