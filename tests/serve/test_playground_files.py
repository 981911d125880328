"""The playground's files: complete, light, of this server only, and nothing in them can become code."""

import re
from dataclasses import fields
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from ar2diff.diffusion.unmask import POLICIES
from ar2diff.engine.request import MODES
from ar2diff.serve.page import ASSETS, HEADERS

FOLDER = files("ar2diff.serve") / "playground"
TEXTS = {name: (FOLDER / name).read_text(encoding="utf-8") for name, _ in ASSETS.values()}
KEY = "a-long-key-for-tests"


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.scripted = [], ""
        self.feed(TEXTS["index.html"])

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] in ("script", "style"):
            self.scripted += data.strip()

    def of(self, kind):
        return [attrs for tag, attrs in self.tags if tag == kind]


PAGE = Page()


@pytest.mark.parametrize("path", ASSETS)
def test_a_file_is_served_as_it_is_installed_under_strict_headers(shared, path):
    got = shared.http.get(path)
    name, media_type = ASSETS[path]
    assert (got.status_code, got.headers["content-type"]) == (200, media_type)
    assert got.content == (FOLDER / name).read_bytes()
    assert {**got.headers, **HEADERS} == dict(got.headers)
    assert "default-src 'self'" in got.headers["content-security-policy"]
    assert not re.search("unsafe|data:|\\*", got.headers["content-security-policy"])
    assert got.headers["x-content-type-options"] == "nosniff"
    again = shared.http.get(path, headers={"if-none-match": got.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert shared.http.head(path).status_code == 200
    assert shared.http.get(path, headers={"if-none-match": '"another"'}).content == got.content


def test_every_file_of_the_folder_is_served_and_nothing_else(shared):
    assert sorted(entry.name for entry in FOLDER.iterdir()) == sorted(TEXTS)
    for path in (
        "/playground",
        "/playground/",
        "/playground/../page.py",
        "/playground/%2e%2e/page.py",
        "/index.html",
    ):
        assert shared.http.get(path).status_code == 404
    assert shared.http.post("/", json={}).status_code == 405


def test_what_the_page_names_is_there(shared):
    named = [attrs[key] for _, attrs in PAGE.tags for key in ("src", "href") if key in attrs]
    named += [f"playground/{name}" for name in re.findall(r'from "\./(.+?)"', TEXTS["playground.js"])]
    assert {f"/{name}" for name in named} == set(ASSETS) - {"/"}
    for name in named:
        assert shared.http.get(f"/{name}").status_code == 200
    ids = {attrs["id"] for _, attrs in PAGE.tags if "id" in attrs}
    assert set(re.findall(r'\bat\("([a-z-]+)"\)', TEXTS["playground.js"])) <= ids
    assert {attrs["for"] for attrs in PAGE.of("label") if "for" in attrs} <= ids


def test_the_page_is_light():
    assert sum(len(text.encode()) for text in TEXTS.values()) < 100_000


@pytest.mark.parametrize("name", TEXTS)
def test_no_address_elsewhere_is_in_a_file(name):
    text = TEXTS[name].replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"\b(https?|wss?|ftp):|[\"'(]//|@import|url\(|sourceMappingURL", text)


def test_nothing_in_the_page_is_code_and_no_text_becomes_markup():
    assert PAGE.scripted == ""
    assert all(attrs.get("type") == "module" and attrs["src"] for attrs in PAGE.of("script"))
    assert not [name for _, attrs in PAGE.tags for name in attrs if name.startswith("on") or name == "style"]
    code = TEXTS["playground.js"] + TEXTS["answer.js"]
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser", code
    )
    assert "textContent" in code


def test_every_control_has_a_name():
    labelled = {attrs.get("for") for attrs in PAGE.of("label")}
    for kind in ("input", "select", "textarea"):
        for attrs in PAGE.of(kind):
            assert attrs["id"] in labelled or attrs.get("type") == "checkbox"


def test_the_page_offers_what_the_engine_has():
    options = {attrs["value"]: attrs for attrs in PAGE.of("option")}
    assert set(options) == {*MODES, *POLICIES, "", "on", "off"}
    for name, kind in POLICIES.items():
        numbers = [field.default for field in fields(kind)]
        given = options[name].get("data-default")
        assert numbers == ([] if given is None else [float(given)])
        if numbers:
            kind(**{fields(kind)[0].name: float(options[name]["data-min"])})
            kind(**{fields(kind)[0].name: float(options[name]["data-max"])})


def test_the_page_needs_no_key_and_what_it_asks_does(kit):
    with kit.running(keys=[KEY]) as server:
        for path in ASSETS:
            assert server.http.get(path).status_code == 200
        for path in ("/v1/models", "/v1/provenance", "/playground/", "/playground/absent.js", "/%2f"):
            assert server.http.get(path).status_code == 401
        assert KEY not in server.http.get("/").text


def test_the_page_is_no_part_of_the_api_description(shared):
    assert not [path for path in shared.http.get("/openapi.json").json()["paths"] if path in ASSETS]
