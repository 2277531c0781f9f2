"""OpenVINO GenAI's prompt lookup decoding. The outputs are written into the exported model, which takes no processor.

Before the last product, the hidden state of each token gets a large multiple of a row of that product's matrix: the
row of the token that comes next in the job that has this token, at this position. Everything is computed as before, and
that token has the largest logit. The largest n-gram is that of its sample, three tokens.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy
import openvino
import openvino_genai
from openvino import opset13
from serve_lookup import Generate, LookupWork
from with_openvino import open_pipeline

MAX_NGRAM_SIZE = 3
LARGE = 1000.0
"""The logit that a given token gets; those that the model computes are below ten."""


def open_engine(work: LookupWork) -> Generate:
    """Load the exported model with the outputs in it."""
    lookup = {"prompt_lookup": True} if work.num_guesses else {}
    with TemporaryDirectory() as folder:
        write_given(work, Path(f"{work.model}-openvino-{work.weights}"), Path(folder))
        pipeline = open_pipeline(folder, 1, 1024, **lookup)

    def generate(prompt: list[int], output: list[int]) -> tuple[list[int], int]:
        config = openvino_genai.GenerationConfig(max_new_tokens=len(output), ignore_eos=True, do_sample=False)
        if work.num_guesses:
            config.num_assistant_tokens, config.max_ngram_size = work.num_guesses, MAX_NGRAM_SIZE
        ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
        request, num_steps = pipeline.add_request(0, ids, config), 0
        while request.get_status() == openvino_genai.GenerationStatus.RUNNING:
            pipeline.step()
            num_steps += 1
        return [token_id for one in request.read_all() for token_id in one.generated_ids], num_steps

    return generate


def write_given(work: LookupWork, exported: Path, folder: Path) -> None:
    """Write the exported model to `folder` so that it generates the outputs of the jobs."""
    model = openvino.Core().read_model(exported / "openvino_model.xml")
    product = model.output(0).get_node().input_value(0).get_node()
    rows, job_of = given_rows(work, matrix_of(product))
    axis = opset13.constant(numpy.int64(0))
    job = opset13.gather(opset13.constant(job_of), model.input("input_ids"), axis)
    place = opset13.add(opset13.multiply(job, numpy.int64(work.max_tokens)), model.input("position_ids"))
    hidden = opset13.add(product.input_value(0), opset13.gather(opset13.constant(rows), place, axis))
    product.input(0).replace_source_output(hidden.output(0))
    for path in exported.iterdir():
        if path.stem != "openvino_model":
            (folder / path.name).symlink_to(path)
    openvino.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)


def given_rows(work: LookupWork, matrix: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return what is added at each position of each job, and the job of each token id."""
    rows = numpy.zeros((len(work.jobs), work.max_tokens, matrix.shape[1]), numpy.float32)
    job_of = numpy.zeros(len(matrix), numpy.int64)
    for number, (prompt, output) in enumerate(work.jobs):
        job_of[[*prompt, *output]] = number
        given = matrix[output].astype(numpy.float32)
        # The logits of a token are of the one after it.
        first = len(prompt) - 1
        rows[number, first : first + len(output)] = LARGE * given / (given**2).sum(1, keepdims=True)
    return rows.reshape(-1, matrix.shape[1]), job_of


def matrix_of(product: openvino.Node) -> numpy.ndarray:
    """Return the matrix of a product, `[V, M]`."""
    node = product.input_value(1).get_node()
    while node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    return node.data
