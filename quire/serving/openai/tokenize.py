"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from __future__ import annotations

from quire.api.openai.answers import DetokenizeAnswer, TokenizeAnswer, TokenizerInfo
from quire.api.openai.tokenize import DetokenizeRequest, TokenizeRequest
from quire.base.errors import RequestError
from quire.serving.answers import Answer, Ready
from quire.serving.context import ServerContext
from quire.serving.core.plan import ChatInput
from quire.serving.core.prepare import count_shown_characters, need_tokenizer, render_chat
from quire.serving.core.served_model import ServedModel
from quire.serving.endpoint import Call
from quire.serving.openai.frames import encode_json
from quire.serving.openai.requests import messages_of, tools_of
from quire.text.detokenizer import IncrementalDetokenizer

MAX_CHARACTERS = 1 << 20
MAX_TOKENIZE_BYTES = 8 << 20
PIECE_TOKENS = 4096
NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


async def post_tokenize(context: ServerContext, call: Call) -> Answer:
    """Turn a prompt or messages into token ids."""
    body = await call.body(TokenizeRequest, max_bytes=MAX_TOKENIZE_BYTES)
    served = context.check_model(body.model)
    call.ignore(served.unused_variables(body.chat_template_kwargs))
    return Ready(await context.prepare(call.owner, call.request_id, body, lambda: encode_json(tokenize(served, body))))


async def post_detokenize(context: ServerContext, call: Call) -> Answer:
    """Turn token ids into text."""
    body = await call.body(DetokenizeRequest)
    served = context.check_model(body.model)
    return Ready(await context.prepare(call.owner, call.request_id, body.tokens, lambda: encode_json(detokenize(served, body))))


async def get_tokenizer_info(context: ServerContext, call: Call) -> Answer:
    """Tell what clients that tokenise here have to know: the special tokens and the chat template."""
    served = context.model
    tokenizer = need_tokenizer(served)
    named = {**dict.fromkeys(NAMED_TOKENS), **tokenizer.named_tokens}
    info = TokenizerInfo(
        vocab_size=tokenizer.vocab_size,
        model_max_length=served.info.max_model_len,
        chat_template=served.template_source or None,
        **{name: named[name] for name in NAMED_TOKENS},
    )
    return Ready(encode_json(info))


def _check_size(num_characters: int, param: str) -> None:
    """Raise RequestError for a text that would occupy a thread for long."""
    if num_characters > MAX_CHARACTERS:
        raise RequestError(f"{param}: may have {MAX_CHARACTERS} characters, got {num_characters}; send it in parts", param)


def tokenize(served: ServedModel, body: TokenizeRequest) -> TokenizeAnswer:
    """Return the tokens of a prompt, or of messages rendered by the chat template. Raises RequestError."""
    tokenizer = need_tokenizer(served)
    if body.messages is None:
        _check_size(len(body.prompt or ""), "prompt")
        token_ids = tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)
    else:
        chat = ChatInput(
            messages=messages_of(body.messages),
            tools=tools_of(body.tools),
            add_generation_prompt=body.add_generation_prompt is not False,
            continues_final_message=bool(body.continue_final_message),
            template_variables=body.chat_template_kwargs or {},
        )
        _check_size(count_shown_characters(chat), "messages")
        rendered = render_chat(served, chat)
        _check_size(len(rendered.text), "messages")
        # The template writes the special tokens. With add_special_tokens, text that looks like a special token becomes one.
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
    # In pieces, because the tokenizer holds the GIL during a call, in any thread.
    stream = IncrementalDetokenizer(need_tokenizer(served), skip_special_tokens=False)
    pieces = [stream.append(body.tokens[start : start + PIECE_TOKENS]) for start in range(0, len(body.tokens), PIECE_TOKENS)]
    return DetokenizeAnswer("".join([*pieces, stream.finish()]))
