"""Pre-tokenizers of byte-level vocabularies, by their names in GGUF files (`tokenizer.ggml.pre`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from quire.base.errors import UnsupportedError
from quire.base.logging import get_logger
from quire.base.suggestions import did_you_mean

logger = get_logger(__name__)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)


@dataclass(frozen=True, slots=True)
class Split:
    """A way to split.

    pattern            of the pieces; None: GPT-2's own
    before             patterns that are applied before it, in order, each to the pieces of the previous one
    cuts_digits        every digit is a piece, before the pattern is applied
    takes_whole_words  a piece that is a token is not merged together
    adds_bos           a text begins with bos unless the file says otherwise
    is_nfc             text is normalised first
    """

    pattern: str | None = None
    before: tuple[str, ...] = ()
    cuts_digits: bool = False
    takes_whole_words: bool = False
    adds_bos: bool = False
    is_nfc: bool = False


_WORDS_OF_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS_OF_DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_HAN_AND_KANA, _HAN_AND_HANGUL = r"[一-龥぀-ゟ゠-ヿ]+", r"[一-龥ࠀ-一가-퟿]+"
# Letters that have a case, as the tokenizer of DeepSeek-LLM lists them.
_CASED_LETTERS = (
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}\x{370}-\x{373}\x{376}"
    r"\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}"
    r"\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}"
    r"\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}"
    r"\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}"
    r"\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}"
    r"\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}"
    r"\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}"
    r"\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}"
    r"\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}"
    r"\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}"
)
_NOT_HAN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
)
_GPT2 = Split()
_DIGITS = Split(cuts_digits=True)
_CL100K = Split(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}")
_LLAMA3 = replace(_CL100K, takes_whole_words=True, adds_bos=True)
_QWEN2 = Split(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}")
_QWEN35 = Split(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = Split(rf"{'|'.join(_CASED_WORDS)}|\p{{N}}|{_REST_WITH_SLASH}", takes_whole_words=True, adds_bos=True)
_GPT4O = Split("|".join([*(f"{words}{_CONTRACTIONS}?" for words in _CASED_WORDS), r"\p{N}{1,3}", _REST_WITH_SLASH]))
_KIMI = Split("|".join([r"\p{Han}+", *(f"{words}{_CONTRACTIONS}?" for words in _NOT_HAN_WORDS), r"\p{N}{1,3}", _REST]))
_DEFAULT = Split(r"[0-9][0-9][0-9]", (r"[\p{P}\$\+<=>\^~\|]+", _WORDS_OF_GPT2, r"\p{N}+"))
_FALCON = Split(r"[0-9][0-9][0-9]", (r"[\p{P}\$\+<=>\^~\|`]+", _WORDS_OF_GPT2))
_DEEPSEEK_LLM = Split(
    r"\p{N}+",
    (r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _HAN_AND_HANGUL),
)
_DEEPSEEK_CODER = Split(r"\p{N}", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL))
_DEEPSEEK_V3 = Split(_WORDS_OF_DEEPSEEK, (r"\p{N}{1,3}", _HAN_AND_KANA))
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_BAILING = Split(r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+")
_SEED_CODER = Split(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_EXAONE_MOE = Split(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|"
    r"\s*[\r\n]|\s+(?!\S)|\s+"
)

_SPLITS: dict[str, Split] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "granite-docling", "exaone4"), _GPT2),
    **dict.fromkeys(("gigachat", "a.x-4.0", "mellum", "modern-bert", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"), _GPT2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "glm5", "chatglm-bpe"), _CL100K),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    "qwen2": replace(_QWEN2, is_nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"), _QWEN2),
    "qwen35": replace(_QWEN35, is_nfc=True),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    "kimi-k2": _KIMI,
    "falcon": _FALCON,
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), Split(_BLOOM)),
    "viking": Split(r"\p{N}", (_BLOOM,)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "seed-coder": _SEED_CODER,
    "exaone-moe": _EXAONE_MOE,
}


def find_split(name: str | None, architecture: str, path: Path) -> Split:
    """Return the pre-tokenizer of a vocabulary; without a name, or with "default", that of llama.cpp, which may be wrong.

    An unknown name is refused: another split would give other tokens.
    """
    if name is None and architecture == "gpt2":
        return _GPT2
    if name in (None, "default"):
        logger.warning(
            "%s: tokenizer.ggml.pre is %s, so that text is split in a general way, which may give other tokens than the model "
            "was trained on; the option tokenizer= takes the folder of the original tokenizer",
            path,
            "missing" if name is None else "'default'",
        )
        return _DEFAULT
    if name not in _SPLITS:
        close = did_you_mean(get_close_matches(name, _SPLITS, 2, 0.6))
        raise UnsupportedError(
            f"{path}: tokenizer.ggml.pre {name!r}{close} is not supported; supported: {', '.join(_SPLITS)}. "
            "Give the option tokenizer= the folder of the original tokenizer"
        )
    return _SPLITS[name]
