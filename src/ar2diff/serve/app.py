"""The application: routes over one service, errors in the public API's shape."""

import json
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ar2diff import __version__
from ar2diff.serve.generate import complete
from ar2diff.serve.guard import Guard
from ar2diff.serve.openapi import describe
from ar2diff.serve.page import read_assets
from ar2diff.serve.problems import ApiError, unavailable
from ar2diff.serve.schemas import ChatRequest, CompletionRequest
from ar2diff.serve.service import Service


def build_app(service: Service) -> FastAPI:
    """The ASGI application of a service; the caller starts the service's worker."""
    app = FastAPI(title="ar2diff", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(Guard, service=service)
    app.add_exception_handler(HTTPException, _reshape)
    routes = _Routes(service)
    for path, method, endpoint in (
        ("/health", "GET", routes.health),
        ("/ready", "GET", routes.ready),
        ("/metrics", "GET", routes.metrics),
        ("/v1/models", "GET", routes.models),
        ("/v1/models/{model:path}", "GET", routes.model),
        ("/v1/provenance", "GET", routes.provenance),
        ("/v1/chat/completions", "POST", routes.chat),
        ("/v1/completions", "POST", routes.completion),
    ):
        app.add_api_route(path, endpoint, methods=[method], response_class=Response)
    for path, asset in read_assets().items():
        app.add_api_route(path, asset.answer, methods=["GET", "HEAD"], include_in_schema=False)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    return app


class _Routes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self) -> Response:
        """Whether the engine lives: 200, or 503 once it is dead, with the kind of fault that killed it."""
        worker = self._service.worker
        # Which kind of fault and no more: this route needs no key. The log says where it was.
        why = {} if worker.fault is None else {"reason": type(worker.fault).__name__}
        return _json({"status": worker.state, **why}, 503 if worker.state in ("dead", "stopped") else 200)

    async def ready(self) -> Response:
        """Whether requests are taken: 200, or 503 while loading, draining or dead."""
        state = self._service.worker.state
        return _json({"status": state}, 200 if state == "ready" else 503)

    async def metrics(self) -> Response:
        """Counters in the Prometheus text format."""
        metrics = self._service.metrics
        return Response(metrics.render(), headers={"content-type": metrics.content_type})

    async def models(self) -> Response:
        """The served model, once it is loaded."""
        served = self._service.served
        return _json({"object": "list", "data": [] if served is None else [served.card()]})

    async def model(self, model: str) -> Response:
        """One model's entry."""
        return _json(self._service.find(model).card())

    async def provenance(self) -> Response:
        """Digests of the served weights and the versions that serve them."""
        if self._service.served is None:
            raise unavailable("the model is loading", "server_loading")
        return _json(self._service.served.provenance())

    async def chat(self, request: Request) -> Response:
        """An answer to a conversation."""
        return await complete(self._service, request, ChatRequest)

    async def completion(self, request: Request) -> Response:
        """The continuation of a text."""
        return await complete(self._service, request, CompletionRequest)


def _json(content: Any, status: int = 200) -> Response:
    return Response(json.dumps(content), status, media_type="application/json")


async def _reshape(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, HTTPException)
    shaped = ApiError(error.status_code, str(error.detail), code=str(error.detail).lower().replace(" ", "_"))
    return Response(json.dumps(shaped.body()), error.status_code, error.headers, media_type="application/json")
