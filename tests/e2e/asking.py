"""The official clients, sync and async, as one callable for the tables of their tests."""

import asyncio
import inspect
import operator

import anthropic
import openai
import pytest

from tests.e2e.tooled_model import KEY

PROMPT = "It was a cold morning when"
MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]
NUM_TOKENS = 16
GREEDY = {"temperature": 0}
ROUTES = {
    "completions": ("completions.create", {"prompt": PROMPT, "max_tokens": NUM_TOKENS}),
    "chat": ("chat.completions.create", {"messages": MESSAGES, "max_tokens": NUM_TOKENS}),
    "responses": ("responses.create", {"input": MESSAGES[0]["content"], "max_output_tokens": NUM_TOKENS}),
    "messages": ("messages.create", {"messages": MESSAGES, "max_tokens": NUM_TOKENS}),
}


class Asker:
    """Calls methods of one client by their paths; what they return is awaited, and of a stream all events are read."""

    def __init__(self, client, url, runner=None):
        self.client, self.url, self._runner = client, url, runner

    def __call__(self, method, /, *args, **fields):
        function = operator.attrgetter(method)(self.client)
        if self._runner is None:
            return self._read(function(*args, **fields))
        return self._runner.run(self._read_async(function(*args, **fields)))

    def _read(self, found):
        return list(found) if isinstance(found, openai.Stream | anthropic.Stream) else found

    async def _read_async(self, call):
        found = await call
        return [event async for event in found] if isinstance(found, openai.AsyncStream | anthropic.AsyncStream) else found

    def create(self, route, **options):
        """Return the answer of a generating route; what its client does not know goes into the body as it is."""
        path, fields = ROUTES[route]
        known = inspect.signature(operator.attrgetter(path)(self.client)).parameters
        fields = {"model": "demo", **fields, **options}
        extra = {name: fields.pop(name) for name in list(fields) if name not in known}
        return self(path, **fields, **({"extra_body": extra} if extra else {}))

    def text(self, route, **options):
        """Return the text of its answer."""
        return text_of(self.create(route, **options))

    def greedy(self, route, **options):
        """Return the text of its most likely answer."""
        return self.text(route, **GREEDY, **options)

    def post(self, path, body):
        """Post to a route that the client has no method for."""
        return self("post", self.url + path, cast_to=object, body=body)

    def refusal(self, method, /, **fields):
        """Return what a call raises."""
        with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
            self(method, **fields)
        return caught.value


def text_of(answer):
    if hasattr(answer, "output_text"):
        return answer.output_text
    if hasattr(answer, "choices"):
        choice = answer.choices[0]
        return choice.text if hasattr(choice, "text") else choice.message.content
    return "".join(block.text for block in answer.content if block.type == "text")


def flavours(sync, is_async, path):
    @pytest.fixture(scope="module", params=["sync", "async"])
    def ask(request, tooled_server):
        options = {"base_url": tooled_server.url + path, "api_key": KEY, "max_retries": 0}
        if request.param == "sync":
            with sync(**options) as client:
                yield Asker(client, tooled_server.url)
            return
        with asyncio.Runner() as runner:
            client = is_async(**options)
            yield Asker(client, tooled_server.url, runner)
            runner.run(client.close())

    return ask


def checks(*rows):
    """Parametrise a test with rows of (name, check)."""
    return pytest.mark.parametrize("check", [check for _, check in rows], ids=[name for name, _ in rows])
