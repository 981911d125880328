"""`ar2diff serve`: an OpenAI-compatible server for one model."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ar2diff.engine.engine import Engine
    from ar2diff.serve.limits import Limits
    from ar2diff.serve.service import Service

KEYS_VARIABLE = "AR2DIFF_API_KEYS"


def serve(
    model: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    precision: Literal["fp32", "bf16", "int8", "auto"] = "auto",
    api_keys: Path | None = None,
    max_waiting: int = 64,
    drain_s: float = 30.0,
    require_provenance: str | None = None,
    request_log: Path | None = None,
) -> None:
    """Serve a model over HTTP, for the public openai client, plain curl and the like.

    Keys that open the server come from --api-keys or the environment variable AR2DIFF_API_KEYS, separated by blanks.
    The log goes to standard error, one JSON object a line, without the text of prompts and answers. The first SIGTERM
    or Ctrl-C lets running requests finish, a second one does not.

    Args:
        model: folder of a model or of a release, a run directory (its newest checkpoint), or a .gguf file.
        host: address to listen on; anything but this machine should have keys.
        port: 0 takes a free one.
        name: what requests call the model; the folder's name unless given.
        precision: fp32, bf16, int8 (compiled for this machine), or auto.
        api_keys: file of API keys, one a line.
        max_waiting: answers that wait for the engine, n of them a request; more are told to come back later.
        drain_s: what running requests get to finish after the first SIGTERM.
        require_provenance: tensor root that the stored weights must have.
        request_log: also add a line an answer to this file: the request's id, the model's tensor root, and digests of
            prompt and answer, by which `ar2diff audit` ties an evaluation's answers to this server.
    """
    import sys

    from ar2diff.cli.generate import load_engine
    from ar2diff.serve.limits import Limits
    from ar2diff.serve.server import open_socket, run_server

    folder = find_model(model)
    limits = Limits(max_waiting=max_waiting, drain_s=drain_s)
    service = build_service(
        name or model.resolve().name.removesuffix(".gguf"),
        lambda: load_engine(folder, precision),
        host,
        api_keys,
        limits,
        require_provenance,
        request_log,
    )
    listening = open_socket(host, port)
    address = f"http://{host if ':' not in host else f'[{host}]'}:{listening.getsockname()[1]}"
    print(f"loading {folder} ...", flush=True)
    service.worker.on_change = lambda: announce(service, address)
    if not service.keys and service.allowed_hosts is None:
        print("warning: everyone who reaches this address may use it; set --api-keys", file=sys.stderr)
    run_server(service, listening)


def build_service(
    name: str,
    load: Callable[[], "Engine"],
    host: str,
    api_keys: Path | None,
    limits: "Limits",
    root: str | None,
    request_log: Path | None = None,
) -> "Service":
    """The service that the flags and the environment ask for."""
    import os
    import secrets
    import sys

    from ar2diff.clock import SystemClock
    from ar2diff.serve.keys import Keys
    from ar2diff.serve.log import JsonLog
    from ar2diff.serve.service import LOOPBACK_HOSTS, Service

    clock = SystemClock()
    is_local = host == "localhost" or host.startswith("127.") or host == "::1"

    return Service(
        name,
        load,
        clock=clock,
        log=JsonLog(sys.stderr.write, clock),
        draw_seed=lambda: secrets.randbits(63),
        new_id=lambda: secrets.token_hex(12),
        keys=Keys.read(api_keys, os.environ.get(KEYS_VARIABLE)),
        limits=limits,
        required_root=root,
        allowed_hosts=LOOPBACK_HOSTS | {host} if is_local else None,
        request_log=None if request_log is None else JsonLog(_open_log(request_log), clock),
    )


def _open_log(path: Path) -> Callable[[str], object]:
    """What adds a line to a file, and fails now where it cannot be written."""
    from ar2diff.errors import ConfigError

    try:
        # Unbuffered: whoever has the answer finds its line. The file lives as long as the process.
        stream = path.open("ab", buffering=0)
    except OSError as error:
        raise ConfigError(
            f"the request log cannot be written: {error.strerror}", given=path, fix="Choose another --request-log"
        ) from None
    return lambda line: stream.write(line.encode())


def find_model(path: Path) -> Path:
    """The newest checkpoint of a run directory; any other path as it is."""
    from ar2diff.train.checkpoint import list_checkpoints

    found = [] if (path / "config.json").exists() else list_checkpoints(path)
    return found[-1] if found else path


def announce(service: "Service", address: str) -> None:
    """Print where the model is, what it is and a line to try, once it is ready."""
    import json
    import shlex

    if service.worker.state != "ready" or service.served is None:
        return
    key = ' -H "Authorization: Bearer $KEY"' if service.keys else ""
    body = json.dumps({"model": service.name, "messages": [{"role": "user", "content": "Hello"}]})
    print(f"address      {address}/v1")
    print(f"playground   {address}/")
    print(f"model        {service.name}")
    print(f"tensor root  {service.served.loaded.tensor_root}")
    print(
        f"curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}",
        flush=True,
    )
