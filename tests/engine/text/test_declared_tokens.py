"""Tokens that a folder declares anywhere: ids, flags, end token and text are those of transformers."""

# The types of `tokenizers` and of transformers are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from sluice.engine.errors import ModelFolderError
from sluice.engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.engine.vocabularies import byte_level_backend, gemma_backend, sentence_piece_backend

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Files = Mapping[str, object]
START, END = "<|im_start|>", "<|im_end|>"
TEXTS = (
    f"{START}user\nHi there{END}\n{START}assistant\n",
    f"a {END} b  {END}c {END.upper()} {START}{START}",
    "<|begin|> the quick<|end|> brown [PAD] fox <tool> x<tool>y <|é|>",
    "naïve café, 10 € 日本語 two words ñandú 😀",
    "<image> <s>text</s> <bos><eos><mask> <start_of_turn>user",
)


def plain() -> Backend:
    """A byte-level tokenizer.json without a chat's markers."""
    return Backend.from_str(byte_level_backend().to_str())


def with_markers(**flags: bool) -> Callable[[], Backend]:
    """The same, with markers in tokenizer.json."""

    def make() -> Backend:
        backend = plain()
        backend.add_tokens([AddedToken(START, **flags), AddedToken(END, **flags)])
        return backend

    return make


def qwen() -> Backend:
    """As Qwen has it: NFC, and a pattern of its own."""
    base = json.loads(plain().to_str())
    base["model"]["vocab"] |= {"<|endoftext|>": 400}
    backend = Backend.from_str(json.dumps(base))
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


def gemma() -> Backend:
    """As Gemma has it, with the tokens that its class names."""
    base = json.loads(gemma_backend().to_str())
    vocab: dict[str, int] = base["model"]["vocab"]
    vocab |= {token: len(vocab) + n for n, token in enumerate(("<pad>", "<eos>", "<bos>", "<mask>"))}
    backend = Backend.from_str(json.dumps(base))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    backend.add_tokens([AddedToken("<mask>", normalized=False)])
    return backend


def llama() -> Backend:
    """As newer folders of Llama 2 have it."""
    backend = Backend.from_str(sentence_piece_backend().to_str())
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    model = backend.model
    assert isinstance(model, models.BPE)
    model.fuse_unk = True
    return backend


def padded() -> Backend:
    """With the padding of a training run."""
    backend = plain()
    backend.enable_padding(pad_id=0, pad_token="[PAD]")
    return backend


def token(content: str, **flags: object) -> dict[str, object]:
    return {"content": content, **flags}


def marked(content: str, **flags: object) -> dict[str, object]:
    return {"__type": "AddedToken", "content": content, **flags}


def config(**values: object) -> Files:
    return {"tokenizer_config.json": values}


def decoder(*tokens: dict[str, object], start: int = 334) -> dict[str, object]:
    return {str(start + n): one for n, one in enumerate(tokens)}


SPECIAL = {"special": True, "normalized": False}
CHATML = decoder(token(START, **SPECIAL), token(END, **SPECIAL))
OLDER = {"special_tokens_map.json": {"eos_token": END, "additional_special_tokens": [START, END]}}

TABLE: Mapping[str, tuple[Callable[[], Backend], Files]] = {
    "nothing": (plain, {}),
    "in tokenizer.json only": (with_markers(special=True), {}),
    "in tokenizer.json, not special": (with_markers(), config(eos_token=END)),
    "decoder": (plain, config(added_tokens_decoder=CHATML, eos_token=END)),
    "decoder without an end": (plain, config(added_tokens_decoder=CHATML)),
    "decoder, other ids": (plain, config(added_tokens_decoder=decoder(*CHATML.values(), start=390), eos_token=END)),  # pyright: ignore[reportArgumentType]
    "decoder, other order": (plain, config(added_tokens_decoder={"340": CHATML["334"], "336": CHATML["335"]})),
    "decoder not special": (plain, config(added_tokens_decoder=decoder(token(START), token(END)), eos_token=END)),
    "decoder strips": (plain, config(added_tokens_decoder=decoder(token(END, lstrip=True, rstrip=True, special=True)))),
    "decoder strips left": (plain, config(added_tokens_decoder=decoder(token(END, lstrip=True)))),
    "decoder single word": (plain, config(added_tokens_decoder=decoder(token("<tool>", single_word=True)))),
    "decoder normalized": (qwen, config(added_tokens_decoder=decoder(token("<tool>", normalized=True)))),
    "decoder changes flags": (
        with_markers(),
        config(added_tokens_decoder=decoder(token(START, **SPECIAL), token(END, rstrip=True, **SPECIAL), start=334)),
    ),
    "decoder makes plain": (with_markers(special=True), config(added_tokens_decoder=decoder(token(START), token(END)))),
    "decoder names a vocabulary's token": (plain, config(added_tokens_decoder={"300": token("the", special=True)})),
    "decoder lacks tokens of tokenizer.json": (with_markers(special=True), config(added_tokens_decoder={})),
    "decoder and older files": (
        plain,
        {**config(added_tokens_decoder=CHATML, eos_token=END), "added_tokens.json": {"<tool>": 340}, **OLDER},
    ),
    "eos_token alone": (plain, config(eos_token=END)),
    "eos_token as an object": (plain, config(eos_token=marked(END, lstrip=True, normalized=True))),
    "eos_token null": (plain, config(eos_token=None)),
    "all names": (
        plain,
        config(bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="[PAD]", sep_token=END, cls_token=START),
    ),
    "additional_special_tokens": (plain, config(eos_token=END, additional_special_tokens=[START, END])),
    "additional objects": (plain, config(additional_special_tokens=[marked(START, **SPECIAL), marked("<tool>")])),
    "extra list": (plain, config(eos_token=END, extra_special_tokens=[START, "<tool>"])),
    "extra dict": (plain, config(extra_special_tokens={"image_token": "<image>", "eoi_token": START})),
    "extra and additional": (plain, config(extra_special_tokens=[START], additional_special_tokens=["<tool>"])),
    "extra dict and additional": (
        plain,
        config(extra_special_tokens={"image_token": "<image>"}, additional_special_tokens=["<tool>"]),
    ),
    "extra empty and additional": (plain, config(extra_special_tokens={}, additional_special_tokens=[START])),
    "a name of its own": (plain, config(image_token="<image>", eos_token=END, add_bos_token=True)),
    "added_tokens.json": (plain, {"added_tokens.json": {START: 334, END: 335}}),
    "added_tokens.json with an end": (plain, {"added_tokens.json": {START: 334, END: 335}, **config(eos_token=END)}),
    "added_tokens.json with extra": (
        plain,
        {"added_tokens.json": {START: 334, END: 335}, **config(extra_special_tokens=[START])},
    ),
    "added_tokens.json, other ids": (plain, {"added_tokens.json": {END: 350, START: 341}}),
    "added_tokens.json claims an id": (plain, {"added_tokens.json": {"<tool>": 0, END: 330}}),
    "added_tokens.json and tokenizer.json": (with_markers(special=True), {"added_tokens.json": {START: 334, END: 335}}),
    "special_tokens_map.json": (plain, OLDER),
    "special_tokens_map.json with objects": (
        plain,
        {"special_tokens_map.json": {"eos_token": token(END, lstrip=True, normalized=False, special=False)}},
    ),
    "special_tokens_map.json against the config": (plain, {**config(eos_token="<|end|>"), **OLDER}),
    "special_tokens_map.json with extra": (
        plain,
        {**config(additional_special_tokens=["<tool>"]), "special_tokens_map.json": {"extra_special_tokens": [START]}},
    ),
    "special_tokens_map.json and added_tokens.json": (plain, {**OLDER, "added_tokens.json": {START: 334, END: 335}}),
    "special_tokens_map.json with a name of its own": (
        plain,
        {"special_tokens_map.json": {"image_token": token("<image>"), "eos_token": None}, **config(eos_token=END)},
    ),
    "padding": (padded, config(eos_token=END)),
    "split special tokens": (with_markers(special=True), config(eos_token=END, split_special_tokens=True)),
    "sentence pieces": (sentence_piece_backend, config(added_tokens_decoder=CHATML, eos_token=END)),
    "sentence pieces, stripping": (
        gemma_backend,
        config(added_tokens_decoder=decoder(token(END, rstrip=True, **SPECIAL)), eos_token=END),
    ),
    "class of Qwen": (qwen, {**config(tokenizer_class="Qwen2Tokenizer", additional_special_tokens=[START, END])}),
    "class of Qwen by type": (qwen, {"config.json": {"model_type": "qwen3"}}),
    "class of Qwen, in spite of another": (
        qwen,
        {**config(tokenizer_class="PreTrainedTokenizerFast", eos_token=END), "config.json": {"model_type": "qwen2"}},
    ),
    "class of Gemma": (gemma, {**config(added_tokens_decoder=decoder(token("<mask>"), start=300)), "config.json": {}}),
    "class of Gemma by type": (gemma, {"config.json": {"model_type": "gemma3_text"}}),
    "class of Llama": (llama, config(tokenizer_class="LlamaTokenizerFast", pad_token="[PAD]")),
    "class of Llama, bytes": (plain, config(tokenizer_class="LlamaTokenizer", eos_token=END)),
    "class that does not exist": (plain, config(tokenizer_class="MyOwnTokenizer", eos_token=END)),
}


@pytest.fixture(params=TABLE, ids=[name.replace(" ", "-") for name in TABLE])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model folder that declares tokens in one of the ways."""
    make, files = TABLE[request.param]
    make().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, {"config.json": {}, **files})
    return tmp_path


def write(folder: Path, files: Files) -> None:
    for name, content in files.items():
        if isinstance(content, dict) and name == "config.json":
            content = {"model_type": "llama", "vocab_size": 500, **content}
        (folder / name).write_text(json.dumps(content))


def theirs_of(folder: Path) -> "PreTrainedTokenizerFast":
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def streamed(tokenizer: Tokenizer, token_ids: list[int], *, skips: bool) -> str:
    stream = tokenizer.stream(skip_special_tokens=skips)
    return "".join([*map(stream.push, token_ids), stream.flush()])


def added(backend: Any) -> dict[int, str]:  # Any: of either side
    return {token_id: repr(one) for token_id, one in backend.get_added_tokens_decoder().items()}


@pytest.mark.slow
class TestGivenEachWayToDeclareTokens:
    def test_when_it_is_loaded_then_all_is_as_in_transformers(self, folder: Path) -> None:
        ours, theirs = load_tokenizer(folder), theirs_of(folder)

        assert added(ours._backend) == added(theirs.backend_tokenizer)  # pyright: ignore[reportPrivateUsage]
        assert ours.facts.special_tokens == theirs.special_tokens_map
        assert ours.facts.eos_token_id == theirs.eos_token_id
        assert ours.vocab_size == len(theirs)
        for text in TEXTS:
            assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
            assert ours.encode(text) == theirs.encode(text)

    def test_when_tokens_are_decoded_then_text_is_theirs_also_streamed(self, folder: Path) -> None:
        ours, theirs = load_tokenizer(folder), theirs_of(folder)
        draws = random.Random(7)
        # Of a byte that is part of no character, the text that was shown before differs.
        token_ids = [one for one in range(len(theirs)) if not str(ours.token(one)).startswith("<0x")]
        outputs = [draws.choices(token_ids, k=12) for _ in range(10)]
        outputs += [ours.encode(text) for text in TEXTS]

        for token_ids in outputs:
            for skips in (True, False):
                expected = theirs.decode(token_ids, skip_special_tokens=skips)
                assert ours.decode(token_ids, skip_special_tokens=skips) == expected
                assert streamed(ours, token_ids, skips=skips) == expected


@pytest.mark.slow
class TestGivenAByteLevelFolderThatNamesCodeLlamasClass:
    """As some are that were converted from GGUF: transformers splits and decodes them as CodeLlama's."""

    def test_when_it_is_loaded_then_its_own_steps_hold(self, tmp_path: Path) -> None:
        with_markers(special=True)().save(str(tmp_path / "tokenizer.json"))
        write(
            tmp_path,
            {"config.json": {}, **config(tokenizer_class="CodeLlamaTokenizer", eos_token=END, unk_token="<|begin|>")},
        )

        ours, theirs = load_tokenizer(tmp_path), theirs_of(tmp_path)

        own = with_markers(special=True)()
        assert [ours.encode(text) for text in TEXTS] == [own.encode(text).ids for text in TEXTS]
        text = "naïve café, 10 € 😀"
        assert ours.decode(ours.encode(text), skip_special_tokens=True) == text
        assert theirs.decode(theirs.encode(text), skip_special_tokens=True) != text
        assert ours.facts.eos_token_id == ours.token_id(END)


class TestGivenADeclarationThatIsWrong:
    @pytest.mark.parametrize(
        ("file", "content", "reason"),
        [
            ("tokenizer_config.json", {"eos_token": 5}, r"tokenizer_config.json: eos_token must be a token.*got 5"),
            ("tokenizer_config.json", {"eos_token": [END]}, "eos_token must be a token"),
            ("tokenizer_config.json", {"bos_token": {"content": None}}, "bos_token must be a token"),
            ("tokenizer_config.json", {"bos_token": True}, "bos_token must be a token"),
            ("special_tokens_map.json", {"eos_token": 1.5}, r"special_tokens_map.json: eos_token must be a token"),
            ("tokenizer_config.json", {"extra_special_tokens": "x"}, "extra_special_tokens must be a list"),
            ("tokenizer_config.json", {"additional_special_tokens": [3]}, "additional_special_tokens must be a token"),
            ("tokenizer_config.json", {"extra_special_tokens": {"a_token": 3}}, "a_token must be a token"),
            ("tokenizer_config.json", {"added_tokens_decoder": []}, "added_tokens_decoder must be an object"),
            ("tokenizer_config.json", {"added_tokens_decoder": {"-1": token(END)}}, "token ids as its keys, got '-1'"),
            (
                "tokenizer_config.json",
                {"added_tokens_decoder": {"1": END}},
                r"added_tokens_decoder\.1 must be an object",
            ),
            ("tokenizer_config.json", {"added_tokens_decoder": {"1": {}}}, r"added_tokens_decoder\.1\.content must be"),
            (
                "tokenizer_config.json",
                {"added_tokens_decoder": {"1": token(END, special="yes")}},
                r"added_tokens_decoder\.1\.special must be true or false, got 'yes'",
            ),
            ("added_tokens.json", {END: "334"}, r"added_tokens.json: <\|im_end\|> must have a token id .* got '334'"),
            ("added_tokens.json", {END: True}, "must have a token id"),
            ("added_tokens.json", {END: None}, "must have a token id"),
            ("added_tokens.json", [], r"added_tokens.json does not hold a JSON object"),
        ],
    )
    def test_when_it_is_loaded_then_the_field_is_named(
        self, tmp_path: Path, file: str, content: object, reason: str
    ) -> None:
        plain().save(str(tmp_path / "tokenizer.json"))
        write(tmp_path, {"config.json": {}, file: content})

        with pytest.raises(ModelFolderError, match=reason):
            load_tokenizer(tmp_path)
