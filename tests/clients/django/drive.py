"""One AsyncProducer in a Django site, used from an async view and from a sync view: `drive.py wsgi|asgi URL`.

Serves the site with threads, asks both views at once, and prints one JSON object: how the requests were answered.
"""

import asyncio
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from socketserver import ThreadingMixIn
from urllib.error import HTTPError
from urllib.request import urlopen
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import django
from asgiref.sync import async_to_sync
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.http import JsonResponse
from django.urls import path

from sluice.producer import AsyncProducer

NUM_REQUESTS = 60
way, url = sys.argv[1:]
producer = AsyncProducer(url)  # as a module of the site has it


async def submit_and_look(name):
    receipt = await producer.submit("hello", max_tokens=2, job_id=f"0.default.{name}")
    assert not receipt.is_duplicate
    return (await producer.status(receipt)).id


async def on_asyncio(request, name):
    return JsonResponse({"id": await submit_and_look(name)})


def in_a_thread(request, name):
    return JsonResponse({"id": async_to_sync(submit_and_look)(name)})


urlpatterns = [path("async/<str:name>", on_asyncio), path("sync/<str:name>", in_a_thread)]


class Threaded(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128


class Quiet(WSGIRequestHandler):
    def log_message(self, *args):
        pass


def serve_wsgi():
    server = make_server("127.0.0.1", 0, get_wsgi_application(), Threaded, Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port


def serve_asgi():
    import uvicorn

    config = uvicorn.Config(get_asgi_application(), port=0, log_level="error", lifespan="off")
    server, started = uvicorn.Server(config), threading.Event()
    before = server.startup

    async def startup(sockets=None):
        await before(sockets)
        started.set()

    server.startup = startup
    threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True).start()
    assert started.wait(30)
    return server.servers[0].sockets[0].getsockname()[1]


def ask(port, view, number):
    name = f"{way}{view}{number}"
    try:
        with urlopen(f"http://127.0.0.1:{port}/{view}/{name}", timeout=30) as answer:
            return "right" if json.load(answer)["id"] == f"0.default.{name}" else "wrong"
    except HTTPError as error:
        return str(error.code)


settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["127.0.0.1"], SECRET_KEY="none", LOGGING_CONFIG=None)
django.setup()
port = serve_wsgi() if way == "wsgi" else serve_asgi()
with ThreadPoolExecutor(8) as threads:
    answers = list(threads.map(lambda n: ask(port, ("async", "sync")[n % 2], n), range(NUM_REQUESTS)))
print(json.dumps({answer: answers.count(answer) for answer in answers}))
