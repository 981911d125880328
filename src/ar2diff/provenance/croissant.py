"""croissant.json: the training data of a run as a data set description, generated from the ledger.

Format: MLCommons Croissant 1.0, JSON-LD over schema.org.
"""

import json
from collections.abc import Iterable
from typing import Any

from ar2diff.provenance.ledger import LedgerEvent

CROISSANT_NAME = "croissant.json"
CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileObject": "cr:fileObject",
    "fileProperty": "cr:fileProperty",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}
FORMATS = {
    ".parquet": "application/x-parquet",
    ".jsonl": "application/jsonl",
    ".json": "application/json",
    ".md": "text/markdown",
}


def render_croissant(events: Iterable[LedgerEvent]) -> str:
    """The document as JSON text: fetched source files and the shard that was made of them."""
    events = list(events)
    last = {event.type: event for event in events}
    fetched = {str(e.data.get("folder")): e.data for e in events if e.type == "fetch"}
    prepared = last.get("prepare")
    files = [_file(folder, data, file) for folder, data in fetched.items() for file in _files_of(folder, data)]
    if prepared is not None:
        files += [_shard_file(name, digest) for name, digest in (prepared.data.get("files") or {}).items()]
    started = last.get("run_started")
    document = {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": f"training data of {started.data.get('run_id') if started else 'a run'}",
        "description": "The source files of a training and the token shard made of them, by digest. Sources that a "
        f"generator makes: {_generated(prepared)}.",
        **({"datePublished": prepared.time} if prepared is not None else {}),
        "distribution": files,
    }
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False, sort_keys=True) + "\n"


def _files_of(folder: str, data: dict[str, Any]) -> list[dict[str, Any]]:
    return [] if folder == "base" else list(data.get("files", []))


def _file(folder: str, data: dict[str, Any], file: dict[str, Any]) -> dict[str, Any]:
    path = f"sources/{folder}/{file['path']}"
    return {
        "@type": "cr:FileObject",
        "@id": path,
        "name": path,
        "description": f"from {data.get('source')}",
        "contentUrl": file.get("url") or path,
        "contentSize": f"{file['size_bytes']} B",
        "encodingFormat": _format_of(path),
        "sha256": file["sha256"],
    }


def _shard_file(name: str, digest: str) -> dict[str, Any]:
    path = f"data/{name}"
    return {
        "@type": "cr:FileObject",
        "@id": path,
        "name": path,
        "contentUrl": path,
        "encodingFormat": _format_of(path),
        "sha256": digest,
    }


def _format_of(path: str) -> str:
    return FORMATS.get("." + path.rpartition(".")[2], "application/octet-stream")


def _generated(prepared: LedgerEvent | None) -> str:
    sources = [] if prepared is None else prepared.data.get("sources") or []
    names = [str(source.get("source")) for source in sources]
    return ", ".join(name for name in names if name.startswith("procedural:")) or "none"
