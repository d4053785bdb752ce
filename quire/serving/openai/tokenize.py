"""POST /tokenize and /detokenize."""

from __future__ import annotations

from quire.api.openai.answers import DetokenizeAnswer, TokenizeAnswer
from quire.api.openai.tokenize import DetokenizeRequest, TokenizeRequest
from quire.base.errors import RequestError
from quire.serving.answers import Answer, Ready
from quire.serving.context import ServerContext
from quire.serving.endpoint import Call
from quire.serving.generation.plan import ChatInput
from quire.serving.generation.prepare import need_tokenizer, render_chat
from quire.serving.generation.served_model import ServedModel
from quire.serving.openai.frames import encode_json
from quire.serving.openai.requests import messages_of, tools_of


async def post_tokenize(context: ServerContext, call: Call) -> Answer:
    """Turn a prompt or messages into token ids."""
    body = await call.body(TokenizeRequest)
    served = context.check_model(body.model)
    return Ready(encode_json(await served.preparation.run(tokenize, served, body)))


async def post_detokenize(context: ServerContext, call: Call) -> Answer:
    """Turn token ids into text."""
    body = await call.body(DetokenizeRequest)
    served = context.check_model(body.model)
    return Ready(encode_json(await served.preparation.run(detokenize, served, body)))


def tokenize(served: ServedModel, body: TokenizeRequest) -> TokenizeAnswer:
    """Return the tokens of a prompt, or of what the chat template makes of messages. Raises RequestError."""
    tokenizer = need_tokenizer(served)
    if body.messages is None:
        token_ids = tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)
    else:
        chat = ChatInput(
            messages=messages_of(body.messages),
            tools=tools_of(body.tools),
            add_generation_prompt=body.add_generation_prompt is not False,
            continues_final_message=bool(body.continue_final_message),
            template_variables=body.chat_template_kwargs or {},
        )
        rendered = render_chat(served, chat)
        # The template writes the special tokens; where more are asked for, what only looks like one cannot be told apart.
        token_ids = tokenizer.encode(rendered.text) if body.add_special_tokens else tokenizer.encode_rendered(rendered)
    strings = [tokenizer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None
    return TokenizeAnswer(len(token_ids), served.info.max_model_len, token_ids, strings)


def detokenize(served: ServedModel, body: DetokenizeRequest) -> DetokenizeAnswer:
    """Return the text of tokens, special ones included. Raises RequestError."""
    size = served.info.vocab_size
    for position, token_id in enumerate(body.tokens):
        if token_id >= size:
            raise RequestError(
                f"tokens: ids must be below {size}, got {token_id} at position {position}", f"tokens[{position}]"
            )
    return DetokenizeAnswer(need_tokenizer(served).decode(body.tokens, skip_special_tokens=False))
