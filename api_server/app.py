"""The HTTP application of one API server: its routes, and what they share."""

from __future__ import annotations

from aiohttp import web

from octavo.api_server.admission import Admission
from octavo.api_server.api_keys import ApiKeys
from octavo.api_server.engine_client import EngineClient
from octavo.api_server.generation.gate import Gate
from octavo.api_server.generation.run import Generator
from octavo.api_server.health import ServerState
from octavo.api_server.http.routes import ROUTES, Services
from octavo.api_server.http.surroundings import Surroundings
from octavo.api_server.metrics import Metrics
from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.config import EngineConfig


def make_app(
    config: EngineConfig,
    tokenizer: Tokenizer,
    engine: EngineClient,
    state: ServerState,
    admission: Admission,
    metrics: Metrics,
    api_keys: ApiKeys | None,
) -> web.Application:
    """Return the application of one API server."""
    error_shapes = {route.path: route.error_shape for route in ROUTES}
    surroundings = Surroundings(config, state, metrics, api_keys, error_shapes)
    app = web.Application(middlewares=[surroundings.around], client_max_size=config.api.max_body_bytes)
    app.on_response_prepare.append(surroundings.on_prepare)
    generator = Generator(Gate(config, tokenizer), engine, admission, config.api.request_timeout_s)
    services = Services(generator, state, metrics, config.model)
    for route in ROUTES:
        handler = route.make_handler(services)
        app.router.add_route(route.method, route.path, handler)
        if route.method == "GET":
            app.router.add_route("HEAD", route.path, handler)
    return app
