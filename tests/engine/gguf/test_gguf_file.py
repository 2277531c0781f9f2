"""GGUF headers: what is read from good ones, and the sentence that each damaged or hostile one gets."""

# The package's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import random
import struct
import tracemalloc
from array import array
from pathlib import Path
from typing import cast

import pytest

from sluice.engine.errors import ModelFolderError
from sluice.engine.gguf.file import GgufFile, TensorInfo, Value, read_gguf
from sluice.engine.gguf.tensors import read_tensor
from sluice.engine.gguf.types import TensorType
from sluice.engine.models.config import parse_config
from sluice.engine.models.folder import open_model_folder
from sluice.engine.models.gguf_config import ARCHITECTURES, config_of, generation_config_of
from sluice.engine.models.gguf_weights import GgufWeights
from sluice.engine.text.tokenizer import load_tokenizer

STRING, ARRAY, UINT32, INT32, FLOAT32 = 8, 9, 4, 5, 6
TOKENS = ["<unk>", "<s>", "</s>", "\u2581a", "a", "b", "\u2581", "<0x0A>"]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(name: str, value: object) -> bytes:
    """One metadata field."""
    match value:
        case int():
            return text(name) + struct.pack("<II", UINT32, value)
        case float():
            return text(name) + struct.pack("<If", FLOAT32, value)
        case str():
            return text(name) + struct.pack("<I", STRING) + text(value)
        case [str(), *_]:
            return text(name) + struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(text, value))
        case [float(), *_]:
            return text(name) + struct.pack(f"<IIQ{len(value)}f", ARRAY, FLOAT32, len(value), *value)
        case [int(), *_]:
            return text(name) + struct.pack(f"<IIQ{len(value)}i", ARRAY, INT32, len(value), *value)
        case _:
            raise AssertionError(value)


FIELDS: dict[str, object] = {
    "general.architecture": "llama",
    "llama.context_length": 32,
    "llama.embedding_length": 8,
    "llama.block_count": 1,
    "llama.feed_forward_length": 8,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": [-float(rank) for rank in range(8)],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 6],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": "{{ messages }}",
}


def tensor(name: str, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)


def whole(
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    fields: bytes | None = None,
    tensors: bytes | None = None,
    data: int = 4096,
) -> bytes:
    """A file."""
    written = b"".join(field(*each) for each in FIELDS.items()) if fields is None else fields
    infos = tensor("token_embd.weight", 8, 8) if tensors is None else tensors
    header = magic + struct.pack("<IQQ", version, 1, len(FIELDS) if fields is None else 1)
    return header + written + infos + bytes(data)


def read(path: Path) -> None:
    """Everything but the weights."""
    folder = open_model_folder(path)
    config = parse_config(folder.config)
    folder.eos_token_ids(config.vocab_size)
    load_tokenizer(path).encode("ab a\n")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model.gguf"
    file.write_bytes(whole())
    return file


class TestGivenAGoodFile:
    def test_when_it_is_opened_then_its_config_tokenizer_and_template_are_read(self, path: Path) -> None:
        folder = open_model_folder(path)
        config, tokenizer = parse_config(folder.config), load_tokenizer(path)

        assert (config.hidden_size, config.num_layers, config.vocab_size, config.is_tied) == (8, 1, 8, True)
        assert folder.eos_token_ids(8) == {2}
        assert tokenizer.encode("ab\n") == [1, 3, 5, 7]
        assert tokenizer.decode([3, 5, 7], skip_special_tokens=True) == "ab\n"
        assert tokenizer.facts.chat_template == "{{ messages }}"
        assert tokenizer.facts.eos_token_id == 2
        assert folder.weights.description == "GGUF of F32"


LONG = 2**62


class TestGivenABadFile:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "cannot mmap an empty file"),
            (b"GG", "would end after the file, which has 2 bytes"),
            (whole(magic=b"PK\x03\x04"), "it begins with b'PK"),
            (whole(version=1), "it has version 1; 2 and 3 are supported"),
            (whole(version=3 << 24), "it is big-endian"),
            (whole(fields=struct.pack("<Q", LONG)), "would end after the file"),
            (whole(fields=text("a") + struct.pack("<I", 99)), "'a' has the unknown type 99"),
            (whole(fields=text("a") + struct.pack("<IIQ", ARRAY, UINT32, LONG)), "'a' at byte .* after the file"),
            (whole(fields=text("a") + struct.pack("<IIQ", ARRAY, STRING, LONG)), "'a' at byte .* after the file"),
            (whole(fields=text("a") + struct.pack("<IIQ", ARRAY, ARRAY, 1)), "array of the unsupported type 9"),
            (whole(fields=struct.pack("<Q", 1) + b"\xff"), "is not UTF-8"),
            (whole(fields=field("general.alignment", 0)), "general.alignment must be a power of two"),
            (whole(tensors=tensor("t", 2**40, 2**40)), "cut short or damaged"),
            (whole(tensors=tensor("t", 8, 8, offset=2**63)), "cut short or damaged"),
            (whole(tensors=tensor("t", 8, 8, kind=10)), "is Q2_K, which is not one of F32"),
            (whole(tensors=tensor("t", 8, 8, kind=12)), r"is \(8, 8\), which Q4_K cannot hold"),
            (whole(tensors=tensor("t", 0, 8)), "cannot hold"),
            (whole(tensors=tensor("t", 1, 1, 1, 1, 1)), "has 5 dimensions"),
            (whole(data=0), "cut short or damaged"),
            (whole(tensors=tensor("t", 1)[:-4], data=0), "would end after the file"),
        ],
    )
    def test_when_it_is_opened_then_a_sentence_says_what_is_wrong(
        self, tmp_path: Path, content: bytes, message: str
    ) -> None:
        file = tmp_path / "model.gguf"
        file.write_bytes(content)

        with pytest.raises(ModelFolderError, match=message):
            read_gguf(file)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"general.architecture": "mamba"}, "architecture 'mamba' is not one of cohere2, command-r"),
            (
                {"llama.expert_count": 8, "llama.expert_used_count": 9, "llama.attention.head_count_kv": 2},
                "num_experts_per_tok must be a whole number from 1 to 8, got 9",
            ),
            ({"general.architecture": "qwen2", "qwen2.expert_count": 8}, "expert_count is 8, which is not supported"),
            ({"general.architecture": "qwen3moe"}, "expert_count is None, which is not supported for 'qwen3moe'"),
            (
                {
                    "general.architecture": "granitemoe",
                    "granitemoe.expert_count": 8,
                    "granitemoe.expert_shared_feed_forward_length": 8,
                },
                "shared_expert_intermediate_size 8 is not supported for granitemoe",
            ),
            ({"split.count": 3}, "is one part of a model"),
            ({"tokenizer.ggml.model": "bert"}, "tokenizer 'bert' is not one of gpt2, llama"),
            ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "x"}, "the rule 'x' of its tokenizer"),
            ({"tokenizer.ggml.scores": [1.0]}, "scores must be a number for each token"),
            ({"llama.block_count": 0}, "num_hidden_layers must be a whole number"),
            ({"tokenizer.ggml.eos_token_id": 99}, "eos_token_id must be a token id below 8"),
        ],
    )
    def test_when_its_fields_ask_for_what_cannot_be_then_it_says_what(
        self, path: Path, changes: dict[str, object], message: str
    ) -> None:
        fields = FIELDS | changes
        written = b"".join(field(*each) for each in fields.items())
        header = b"GGUF" + struct.pack("<IQQ", 3, 1, len(fields))
        path.write_bytes(header + written + tensor("token_embd.weight", 8, 8) + bytes(4096))

        with pytest.raises(ModelFolderError, match=message):
            read(path)

    def test_when_several_are_in_a_folder_then_one_is_named(self, path: Path) -> None:
        (path.parent / "other.gguf").write_bytes(b"")

        with pytest.raises(ModelFolderError, match=r"has 2 GGUF files: give one, such as .*model\.gguf"):
            open_model_folder(path.parent)


def mutated(content: bytes, source: random.Random) -> bytes:
    """The header with a few bytes, lengths or cuts that no writer makes."""
    changed = bytearray(content)
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(changed) - 4096 - 8)
        match source.randrange(4):
            case 0:
                changed[at] ^= 1 << source.randrange(8)
            case 1:
                changed[at : at + 8] = struct.pack("<Q", source.choice([0, 1, 2**31, 2**32 - 1, 2**62, 2**64 - 1]))
            case 2:
                changed[at : at + 4] = source.randbytes(4)
            case _:
                del changed[at : at + source.randint(1, 40)]
    return bytes(changed)


ODD: list[Value] = [
    *(0, 1, -1, 2**32, 2**63, True, 0.5, float("nan"), float("inf"), -1e38, "", "8", "linear", "yarn"),
    *(array("i", [1]), array("f", [0.5, 2.0]), array("i"), ["x"], list[str]()),
]
NAMES = [
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size", "expert_count"),
    *("expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length"),
    *(f"attention.{name}" for name in ("head_count", "head_count_kv", "key_length", "sliding_window", "scale")),
    *("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "logit_scale", "embedding_scale"),
    *(f"rope.{name}" for name in ("freq_base", "dimension_count", "scale_linear", "scaling.type", "scaling.factor")),
    *("rope.scaling.original_context_length", "rope.scaling.attn_factor", "final_logit_softcapping"),
]
OF_ANGLES = ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"]


class TestGivenFieldsOfAnyKind:
    """As a damaged or hostile file may have them: missing, of another type, out of range."""

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_when_a_file_has_no_others_then_it_is_read_or_refused(self, tmp_path: Path, architecture: str) -> None:
        fields: dict[str, Value] = {"general.architecture": architecture}

        assert is_read_or_refused(file_of(tmp_path, fields, []))

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_when_they_are_drawn_at_random_then_each_file_is_read_or_refused(
        self, tmp_path: Path, architecture: str
    ) -> None:
        source = random.Random(architecture)

        for _ in range(300):
            fields: dict[str, Value] = {
                key.replace("llama", architecture): cast("Value", value) for key, value in FIELDS.items()
            }
            fields |= {f"{architecture}.{name}": source.choice(ODD) for name in source.sample(NAMES, 3)}
            for name in source.sample(sorted(fields), source.randrange(3)):
                del fields[name]
            fields["general.architecture"] = architecture

            assert is_read_or_refused(file_of(tmp_path, fields, source.sample(OF_ANGLES, source.randrange(3)))), fields

    def test_when_its_angles_are_cut_off_after_the_header_then_it_is_refused(self, tmp_path: Path) -> None:
        file = file_of(tmp_path, {"general.architecture": "llama"}, OF_ANGLES)
        file.path.write_bytes(b"")

        with pytest.raises(ModelFolderError, match=r"'rope_factors_short.weight' of .* cannot be read"):
            config_of(file)


def file_of(folder: Path, fields: dict[str, Value], angles: list[str]) -> GgufFile:
    """The header of a file with these fields and tensors of angles."""
    path = folder / "model.gguf"
    path.write_bytes(bytes(4096))
    info = TensorInfo(type=TensorType.F32, shape=(2,), offset=64, num_bytes=8)
    embedding = TensorInfo(type=TensorType.F32, shape=(8, 8), offset=128, num_bytes=256)
    tensors = {"token_embd.weight": embedding, **dict.fromkeys(angles, info)}
    return GgufFile(path=path, metadata=fields, tensors=tensors, header_bytes=64)


def is_read_or_refused(file: GgufFile) -> bool:
    """Whether a config is made of a file, or an error says why not."""
    try:
        generation_config_of(file)
        return parse_config(config_of(file)).hidden_size > 0
    except ModelFolderError as error:
        return bool(str(error))


class TestGivenAFileThatIsCutAfterItsHeaderWasRead:
    def test_when_a_tensor_is_read_then_it_is_an_error_of_the_file(self, path: Path) -> None:
        file = read_gguf(path)
        path.write_bytes(path.read_bytes()[: file.header_bytes])

        with pytest.raises(OSError, match="was cut after its header was read"):
            read_tensor(file.path, file.tensors["token_embd.weight"])
        with pytest.raises(ModelFolderError, match="cannot be read"):
            GgufWeights(file, "llama").get("model.embed_tokens.weight", (8, 8))


class TestGivenHeadersWithRandomDamage:
    @pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.long)])
    def test_when_they_are_opened_then_each_is_read_or_refused_within_its_size(self, path: Path, count: int) -> None:
        source, good = random.Random(count), path.read_bytes()
        refused = 0
        read(path)
        tracemalloc.start()
        for number in range(count):
            content = mutated(good, source)
            path.write_bytes(content)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                read(path)
            except ModelFolderError:
                refused += 1
            # Objects of the interpreter are larger than their bytes in the file, by a bounded factor.
            assert tracemalloc.get_traced_memory()[1] - before < 40 * len(content), number
        tracemalloc.stop()

        assert refused > count // 2
