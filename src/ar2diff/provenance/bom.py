"""bom.cdx.json: the bill of materials of a model, generated from the ledger: base, data sources, libraries, result.

Format: CycloneDX 1.6 with a machine-learning component (ECMA-424).
"""

import json
import uuid
from collections.abc import Iterable
from typing import Any

from ar2diff.provenance.environment import APPLIED_EVENT, CODE_EVENT, STAGES
from ar2diff.provenance.ledger import LedgerEvent

BOM_NAME = "bom.cdx.json"
MODEL_REF = "model"


def render_bom(events: Iterable[LedgerEvent]) -> str:
    """The document as JSON text: the same events give the same bytes."""
    events = list(events)
    last = {event.type: event.data for event in events}
    sources = {str(e.data.get("source")): e.data for e in events if e.type == "fetch"}
    adapters = [_adapter(last[APPLIED_EVENT])] if APPLIED_EVENT in last else []
    components = [_source(data) for data in sources.values()] + adapters + _libraries(last.get(CODE_EVENT, {}))
    run_id = str(last.get("run_started", {}).get("run_id"))
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'ar2diff:{run_id}')}",
        "version": 1,
        "metadata": {**_timestamp(events), "tools": {"components": [_tool(last)]}, "component": _model(run_id, last)},
        "components": components,
        "dependencies": [{"ref": MODEL_REF, "dependsOn": [component["bom-ref"] for component in components]}],
    }
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False, sort_keys=True) + "\n"


def _timestamp(events: list[LedgerEvent]) -> dict[str, str]:
    times = [event.time for event in events if event.type in STAGES]
    return {"timestamp": times[-1]} if times else {}


def _tool(last: dict[str, dict[str, Any]]) -> dict[str, Any]:
    versions = last.get(CODE_EVENT, {}).get("versions") or {}
    version = versions.get("ar2diff")
    return {"type": "application", "name": "ar2diff", **({"version": str(version)} if version else {})}


def _model(run_id: str, last: dict[str, dict[str, Any]]) -> dict[str, Any]:
    started, finished = last.get("train_started", {}), last.get("train_finished") or last.get("train_interrupted", {})
    applied = last.get(APPLIED_EVENT)
    facts = {
        "tensor_root": finished.get("tensor_root"),
        "base_tensor_root": (applied or started).get("base_tensor_root"),
        "start_tensor_root": applied and applied.get("tensor_root"),
        "block_size": started.get("block_size"),
        "mask_token_id": started.get("mask_token_id"),
    }
    parameters = {
        "approach": {"type": "self-supervised"},
        "task": "text-generation",
        "architectureFamily": "block diffusion",
    }
    properties = [
        {"name": f"ar2diff:{name}", "value": str(value)} for name, value in facts.items() if value is not None
    ]
    return {
        "type": "machine-learning-model",
        "bom-ref": MODEL_REF,
        "name": run_id,
        "modelCard": {"modelParameters": parameters},
        "properties": properties,
    }


def _source(data: dict[str, Any]) -> dict[str, Any]:
    name, is_base = str(data.get("source")), data.get("folder") == "base"
    files = [
        {
            "type": "file",
            "bom-ref": f"{name}/{file['path']}",
            "name": file["path"],
            "hashes": [{"alg": "SHA-256", "content": file["sha256"]}],
            "properties": [{"name": "ar2diff:size_bytes", "value": str(file["size_bytes"])}],
        }
        for file in data.get("files", [])
    ]
    revision = {"version": data["revision"]} if data.get("revision") else {}
    kind = "machine-learning-model" if is_base else "data"
    return {"type": kind, "bom-ref": name, "name": name, **revision, "components": files}


def _adapter(data: dict[str, Any]) -> dict[str, Any]:
    """The stored adapter that training went on with."""
    name = str(data.get("source"))
    files = [
        {
            "type": "file",
            "bom-ref": f"{name}/{path}",
            "name": path,
            "hashes": [{"alg": "SHA-256", "content": digest}],
        }
        for path, digest in sorted((data.get("files") or {}).items())
    ]
    return {"type": "machine-learning-model", "bom-ref": name, "name": name, "components": files}


def _libraries(code: dict[str, Any]) -> list[dict[str, Any]]:
    versions = {name: version for name, version in (code.get("versions") or {}).items() if version}
    found = []
    for name, version in sorted(versions.items()):
        if name in ("python", "ar2diff"):
            continue
        digest = ((code.get("libraries") or {}).get(name) or {}).get("files_sha256")
        properties = {"properties": [{"name": "ar2diff:files_sha256", "value": digest}]} if digest else {}
        purl = f"pkg:pypi/{name}@{str(version).replace('+', '%2B')}"
        found.append(
            {"type": "library", "bom-ref": purl, "name": name, "version": str(version), "purl": purl, **properties}
        )
    return found
