"""The page in a real browser, with a running server."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from live_server import Live, Serving

pytest.importorskip("selenium", reason="the browser is driven by selenium")

from selenium.webdriver import ActionChains, Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

DRIVER = which("chromedriver")
PROMPT = "Once upon a time there was a little fox"
AXE = Path(__file__).parents[2] / "build" / "node_modules" / "axe-core" / "axe.min.js"
RUN_AXE = """
const done = arguments[arguments.length - 1];
const rules = {"label-content-name-mismatch": {enabled: true}, "target-size": {enabled: true}};
axe.run(document, {rules, resultTypes: ["violations"]}).then(({violations}) => done(violations.map(
  ({id, nodes}) => [id, nodes.map(({html, failureSummary}) => [html.slice(0, 200), failureSummary])])),
  (error) => done([["axe failed", String(error)]]));
"""
FOCUS = """
const node = document.activeElement;
const outlined = (one) => {
  const {outlineStyle, outlineWidth} = getComputedStyle(one);
  return outlineStyle !== "none" && parseFloat(outlineWidth) >= 2;
};
const name = node.id || [node.tagName, node.name, node.value, node.textContent.slice(0, 20)].join(" ").trim();
const inside = node.id === "prompt" ? node.form : node.matches("input[type=radio]") ? node.nextElementSibling : node;
return [node === document.body ? "" : name, outlined(node) || outlined(inside)];
"""  # what is focused, and whether it, its label or its frame has an outline
CUT = """
const clips = (node) => ["hidden", "clip"].includes(getComputedStyle(node).overflowX);
const bound = (node) => {
  for (let up = node; up; up = up.parentElement) if (clips(up)) return up.getBoundingClientRect();
  return {left: 0, right: innerWidth};
};
return [...document.querySelectorAll("main *, header *, footer *")]
  .filter((node) => node.checkVisibility() && !node.closest(".vh") && node.getClientRects().length)
  .filter((node) => [...node.childNodes].some((child) => child.data?.trim()) || node.matches("input, select, canvas"))
  .filter((node) => {
    const box = node.getBoundingClientRect(), {left, right} = bound(node);
    return box.left < left - 0.5 || box.right > right + 0.5 || (clips(node) && node.scrollWidth > node.clientWidth + 1);
  })
  .map((node) => node.outerHTML.slice(0, 120));
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DRIVER is None, reason="there is no chromedriver to open a browser with"),
]


class Page:
    """What a user sees and does."""

    def __init__(self, browser: Chrome) -> None:
        self.browser = browser
        self.expected = 0  # errors in the browser's log

    def open(self, url: str, width: int = 1280, height: int = 1000) -> "Page":
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.browser.get(url)
        self.until(lambda: self.all("#servers li"))
        return self

    def until(self, condition: Callable[[], object]) -> None:
        WebDriverWait(self.browser, 30, 0.02).until(lambda _: condition())

    def one(self, selector: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def script(self, code: str, *arguments: object) -> Any:
        return self.browser.execute_script(code, *arguments)

    def content(self, selector: str) -> str:
        return str(self.script("return document.querySelector(arguments[0]).textContent", selector))

    def contents(self, selector: str) -> list[str]:
        """The text of all such elements that are shown at one moment: the page may replace them at the next."""
        code = (
            "return [...document.querySelectorAll(arguments[0])].filter((node) => node.checkVisibility())"
            ".map((node) => node.innerText)"
        )
        return list(self.script(code, selector))

    def write(self, selector: str, value: object) -> None:
        self.one(selector).clear()
        self.one(selector).send_keys(str(value))

    def press(self, *keys: str) -> None:
        ActionChains(self.browser).send_keys(*keys).perform()

    @property
    def busy(self) -> bool:
        return self.one("#stop").is_displayed()

    @property
    def count(self) -> int:
        """Tokens of the text."""
        return int(self.script("return document.querySelectorAll('#text .token').length"))

    def generate(self, tokens: int) -> None:
        self.write("#max_tokens", tokens)
        self.one("#generate").click()

    def finished(self) -> None:
        self.until(lambda: not self.busy)

    @property
    def overflows(self) -> bool:
        return bool(self.script("return document.documentElement.scrollWidth > innerWidth"))

    @property
    def cut(self) -> list[str]:
        """Elements with text that end beyond the window or the element that clips them."""
        return list(self.script(CUT))

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}] if scheme else []
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def check_accessibility(self) -> None:
        """Run axe-core, around the content security policy as a browser's extension would."""
        if not self.script("return Boolean(window.axe)"):
            self.script(AXE.read_text())
        findings = self.browser.execute_async_script(RUN_AXE)
        assert findings == [], findings


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    options = ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = Chrome(options=options, service=Service(DRIVER))
    yield chrome
    chrome.quit()


@pytest.fixture
def page(browser: Chrome) -> Iterator[Page]:
    """At the end the console has only the expected errors, and the browser's storage is cleared."""
    browser.get_log("browser")  # type: ignore[no-untyped-call]
    page = Page(browser)
    yield page
    log = browser.get_log("browser")  # type: ignore[no-untyped-call]
    assert len([entry for entry in log if entry["level"] != "INFO"]) == page.expected, log
    browser.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": "*", "storageTypes": "all"})


def plain(live: Live, tokens: int, **fields: object) -> dict[str, Any]:
    """The server's response to the same request without streaming."""
    body = {"model": "builtin", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "seed": 0}
    answer = live.post("/v1/completions", **body, **fields)
    assert answer.status_code == 200
    return dict(answer.json()["choices"][0])


def test_page_loads_and_runs_only_its_own_files(live: Live, page: Page) -> None:
    page.open(live.url)
    assert page.one("#prompt").get_property("value") == PROMPT
    titles = [str(item.get_attribute("title")) for item in page.all("#servers li")]
    assert [title.partition(": ")[0] for title in titles] == ["drafter", "target-1", "target-2"]
    loaded = page.script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert all(name.startswith(live.url) for name in loaded)
    assert "default-src 'none'" in live.get("/").headers["content-security-policy"]
    page.script(
        "const strange = document.createElement('script');"
        "strange.text = 'window.ran = true';"
        "document.body.append(strange)"
    )
    assert page.script("return window.ran") is None
    page.expected = 1


def test_page_text_grows_to_the_servers_text(live: Live, page: Page) -> None:
    page.open(live.url)
    page.script(
        "window.seen = [];"
        "new MutationObserver(() => seen.push(document.querySelectorAll('#text .token').length))"
        ".observe(document.querySelector('#text'), {subtree: true, childList: true})"
    )
    page.one("#algorithm input[value=dsi]").click()  # on busy cores auto may not speculate
    page.generate(150)
    page.finished()
    seen = page.script("return seen")
    assert seen == sorted(seen)
    assert len({count for count in seen if 0 < count < 150}) > 1
    assert (page.count, page.content("#text .tokens")) == (150, plain(live, 150)["text"])
    hows = [int(page.content(f"#legend .{how} b")) for how in ("accepted", "corrected", "plain")]
    assert sum(hows) == 150
    assert hows[0] > 75
    assert float(page.content("#f-speed")) > 1
    assert page.content("#summary").startswith("Finished: 150 tokens in ")
    assert [row.split()[0] for row in page.contents("#against li")] == ["DSI", "SI", "non-SI"]
    assert page.content("#against").count("estimated") == 2


def test_page_offers_trace_and_table(live: Live, page: Page) -> None:
    page.open(live.url)
    page.generate(24)
    page.finished()
    path = str(page.one("#trace").get_attribute("href")).removeprefix(live.url)
    assert live.get(path).json()["traceEvents"]
    page.one("details.table summary").click()
    page.until(lambda: page.all("#table tbody tr"))
    servers = {row.split()[0] for row in page.one("#table tbody").text.splitlines()}
    assert servers == {"drafter", "target-1", "target-2"}
    label = str(page.one("#timeline").get_attribute("aria-label"))
    assert all(f"{server} " in label for server in servers)


def test_page_tokens_show_alternatives_and_follow_arrow_keys(live: Live, page: Page) -> None:
    page.open(live.url)
    page.generate(24)
    page.finished()
    assert [token.get_attribute("data-index") for token in page.all(".token[tabindex='0']")] == ["0"]
    page.script("document.querySelector('.token[tabindex=\"0\"]').focus()")
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert page.browser.switch_to.active_element.get_attribute("data-index") == "1"
    assert page.browser.switch_to.active_element.get_attribute("aria-describedby") == "tip"
    assert page.one("#tip").is_displayed()
    likely = plain(live, 24, logprobs=3)["logprobs"]["top_logprobs"][1]
    alternatives = [row.find_element(By.TAG_NAME, "span").text for row in page.all("#tip li")]
    assert alternatives == [text.replace(" ", "␣") for text in likely]
    page.press(Keys.END)
    assert page.browser.switch_to.active_element.get_attribute("data-index") == "23"
    page.press(Keys.HOME, Keys.ARROW_DOWN)
    assert page.browser.switch_to.active_element.get_attribute("data-index") != "0"
    page.press(Keys.ESCAPE)
    assert not page.one("#tip").is_displayed()


def test_timeline_describes_the_forward_under_the_pointer(live: Live, page: Page) -> None:
    page.open(live.url)
    page.one("#algorithm input[value=dsi]").click()  # auto may do without the second target
    page.generate(96)  # for which the second target has to verify something, too
    page.finished()
    canvas = page.one("#timeline")
    page.script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    last_lane = int(canvas.size["height"]) // 2 - 42
    range_of_tokens = None
    # A narrow bar of the other lane may be the first that the pointer meets.
    for right in range(-300, 300, 4):
        ActionChains(page.browser, duration=0).move_to_element_with_offset(canvas, right, last_lane).perform()
        tip = "".join(page.contents("#tip .tip-head"))
        range_of_tokens = re.fullmatch(r"target-2 verifies tokens? (\d+)(?: to (\d+))?", tip)
        if range_of_tokens:
            break
    assert range_of_tokens
    assert page.one("#tip").is_displayed()
    first, last = int(range_of_tokens[1]), int(range_of_tokens[2] or range_of_tokens[1])
    marked = [int(str(token.get_attribute("data-index"))) for token in page.all("#text .token.marked")]
    assert marked == [place for place in range(first - 1, last) if place < 96]


def test_timeline_shows_decisions_of_auto(live: Live, page: Page) -> None:
    page.open(live.url)
    page.one("#algorithm input[value=auto]").click()
    page.generate(24)
    page.finished()
    assert page.content("#status").startswith("auto · 24 tokens in ")
    canvas = page.one("#timeline")
    height = canvas.size["height"]
    ActionChains(page.browser).move_to_element_with_offset(canvas, 0, 30 - height // 2).perform()
    page.until(lambda: page.one("#tip").is_displayed())
    decision = r"auto: (SP \d+, lookahead \d+, min draft \d+|SI, lookahead \d+|no speculation) from token \d+ on"
    assert re.search(decision, page.content("#tip"))


def test_page_replays_a_request(live: Live, page: Page) -> None:
    page.open(live.url)
    page.generate(48)
    page.finished()
    page.one("#player input[type='range']").send_keys(Keys.HOME)
    assert len(page.all("#text .token.later")) == 48
    page.one("#player .play").click()
    page.until(lambda: page.one("#player .play").text == "Replay")
    assert page.all("#text .token.later") == []


def test_page_race_replays_three_algorithms(live: Live, page: Page) -> None:
    page.open(live.url)
    page.write("#max_tokens", 48)
    page.one("#race").click()
    page.until(lambda: page.one("#verdict").is_displayed())
    same = "Same text, token for token. All three wrote the same 48 tokens"
    assert page.content("#verdict").startswith(same)
    page.until(lambda: len(page.all(".column.over")) == 3)
    assert [title.text for title in page.all(".column h3")] == ["non-SI", "SI", "DSI"]
    texts = page.script("return [...document.querySelectorAll('.column .tokens')].map((one) => one.textContent)")
    assert texts == [plain(live, 48)["text"]] * 3
    assert len(page.all(".column:first-child .token.plain")) == 48
    times = [float(clock.text.removesuffix(" s")) for clock in page.all(".column .clock")]
    ratios = re.findall(r"([\d.]+)×", page.all(".column .ratio")[2].text)
    assert [float(ratio) for ratio in ratios] == pytest.approx([times[0] / times[2], times[1] / times[2]], rel=0.02)
    assert "one after the other" in page.content("#races .note")
    page.one("#back").click()
    assert page.one("#single").is_displayed()


def test_page_escape_stops_a_request(live: Live, page: Page) -> None:
    page.open(live.url)
    page.generate(400)
    page.until(lambda: page.count > 4)
    page.press(Keys.ESCAPE)
    page.finished()
    stopped = page.count
    assert 4 < stopped < 400
    assert page.one("#generate").is_displayed()
    assert "stopped after" in page.content("#status")
    assert page.content("#alert") == ""
    whole = plain(live, stopped)["text"]
    assert (page.count, page.content("#text .tokens")) == (stopped, whole)
    assert live.get("/health").json()["status"] == "ok"
    page.generate(8)
    page.until(lambda: page.count == 8)
    page.finished()


def test_page_marks_a_killed_target(serving: Serving, page: Page) -> None:
    live = serving("--sp", "2")
    page.open(live.url)
    page.generate(300)
    page.until(lambda: page.count > 20)
    os.kill(min(live.children), signal.SIGKILL)
    page.finished()
    [lost] = [server for server in live.get("/health").json()["servers"] if server["restarts"]]
    assert (lost["role"], lost["alive"], lost["restarts"]) == ("target", True, 1)
    name = lost["name"]
    assert page.content("#text .tokens") == plain(live, 300)["text"]
    assert page.one("#single .k-lost").is_displayed()
    assert f"{name} was lost and replaced at" in str(page.one("#timeline").get_attribute("aria-label"))
    assert f"{name}: restarted once" in [item.get_attribute("title") for item in page.all("#servers li")]
    assert f"{name} lost on the way" in page.content("#status")


def test_page_shows_a_refusal_in_one_line(live: Live, page: Page) -> None:
    page.open(live.url)
    page.generate(5000)
    page.until(lambda: page.content("#alert"))
    refusal = live.post("/v1/completions", model="builtin", prompt=PROMPT, max_tokens=5000).json()
    assert page.content("#alert") == refusal["error"]["message"]
    assert page.one("#alert").size["height"] < 60
    page.expected = 1
    page.generate(8)
    page.until(lambda: page.count == 8)
    page.finished()
    assert not page.one("#alert").is_displayed()


def test_page_refuses_an_invalid_setting(live: Live, page: Page) -> None:
    page.open(live.url)
    page.generate(0)
    assert page.content("#alert") == "Tokens 0: must be a whole number, at least 1."
    assert not page.busy


def test_page_asks_for_an_api_key_and_keeps_it_in_the_tab(serving: Serving, page: Page) -> None:
    live = serving(env={"DSI_API_KEYS": "sesame"})
    page.browser.get(live.url)
    page.until(lambda: "API key" in page.content("#alert"))
    assert page.browser.switch_to.active_element.get_attribute("id") == "key"
    page.press("sesame", Keys.TAB)
    page.until(lambda: page.all("#servers li"))
    page.generate(8)
    page.until(lambda: page.count == 8)
    page.finished()
    kept = page.script("return [sessionStorage, localStorage].map((one) => one.getItem('dsi-key'))")
    assert kept == ["sesame", None]
    page.expected = 1


def test_page_fits_a_phone(live: Live, page: Page, tmp_path: Path) -> None:
    def check() -> None:
        assert not page.overflows
        assert page.cut == []

    page.open(live.url, 360, 780)
    check()
    page.one("#more").click()
    check()
    page.generate(24)
    page.until(lambda: page.count == 24)
    page.finished()
    check()
    page.browser.save_screenshot(str(tmp_path / "phone.png"))
    page.one("#race").click()
    page.until(lambda: len(page.all(".column.over")) == 3)
    check()
    boxes = [column.rect for column in page.all(".column")]
    assert all(0 <= box["x"] < box["x"] + box["width"] <= 360 for box in boxes)
    assert boxes[-1]["y"] + boxes[-1]["height"] - boxes[0]["y"] <= 780  # all in one window
    page.script("document.querySelector('#columns').scrollIntoView()")
    page.browser.save_screenshot(str(tmp_path / "race.png"))


needs_axe = pytest.mark.skipif(not AXE.exists(), reason="there is no axe-core: make browser installs it")


@needs_axe
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 360)])  # they do not depend on each other
def test_page_has_no_accessibility_finding(live: Live, page: Page, scheme: str, width: int) -> None:
    page.prefer(scheme)
    page.open(live.url, width)
    page.check_accessibility()
    page.one("#more").click()
    page.generate(300)
    page.until(lambda: page.count > 4)
    page.check_accessibility()
    page.press(Keys.ESCAPE)
    page.finished()
    page.write("#prompt", "def f(x):")
    for algorithm in page.all("#algorithm input"):
        algorithm.click()
        page.generate(8)
        page.finished()
        page.check_accessibility()
    page.one("details.table summary").click()
    page.script("document.querySelector('.token[tabindex=\"0\"]').focus()")
    page.check_accessibility()
    page.generate(0)
    page.until(lambda: page.content("#alert"))
    page.check_accessibility()
    page.write("#max_tokens", 24)
    page.one("#race").click()
    page.until(lambda: len(page.all(".column.over")) == 3)
    page.check_accessibility()
    page.prefer("")


def test_page_names_tokens_that_are_only_space(live: Live, page: Page) -> None:
    page.open(live.url)
    page.generate(64)
    page.finished()
    tokens = page.all("#text .token")
    named = {str(token.get_attribute("textContent")): token.accessible_name for token in tokens}
    blank = {text: name for text, name in named.items() if not text.strip()}
    assert any("\n" in text for text in blank)
    assert all("newline" in name for text, name in blank.items() if "\n" in text)
    assert all(named.values())
    assert page.one("[data-zoom=fit]").accessible_name == "fit: show the whole request"


def test_page_shows_where_the_keyboard_is(live: Live, page: Page) -> None:
    """Each element that Tab reaches, from the first to the last, has an outline of two pixels."""
    page.open(live.url)
    page.one("#more").click()
    page.generate(8)
    page.finished()
    page.script("document.querySelector('.skip').focus()")
    seen: dict[str, bool] = {}
    while True:
        page.press(Keys.TAB)
        name, shown = page.script(FOCUS)
        if not name or name in seen:
            break
        seen[name] = shown
    assert {"theme", "prompt", "max_tokens", "more", "rule", "race", "generate", "copy", "trace"} <= seen.keys()
    assert any(name.startswith("SPAN") for name in seen)  # a token
    assert [name for name, shown in seen.items() if not shown] == []


def test_page_theme_follows_the_system_until_changed(live: Live, page: Page) -> None:
    def background() -> tuple[int, ...]:
        value = str(page.script("return getComputedStyle(document.documentElement).backgroundColor"))
        return tuple(int(part) for part in value[4:-1].split(","))

    for scheme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        page.open(live.url)
        assert (sum(background()) < 384) == (scheme == "dark")
        page.one("#theme").click()
        assert (sum(background()) < 384) == (scheme == "light")
        page.script("localStorage.clear()")
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
