"""Schedulers of other batching disciplines, to be compared with the default one. Their step is never overlapped.

| name | who joins, and when | blocks reserved at the join | prompts | padded |
|---|---|---|---|---|
| continuous | any sequence, in any step | known tokens, then one at a time | split by the budget, with decodes | no |
| prefill-first | any sequence, in any step | known tokens, then one at a time | whole; decodes pause | no |
| slots | any sequence, while a slot is free | the model's longest sequence | split by the budget, with decodes | no |
| orca | any sequence, in any step | prompt and its longest output | whole, with decodes | no |
| dynamic | a full batch, or after a window | prompt and its longest output | whole, all at once | yes |
| static | a batch, when the previous one has ended | prompt and its longest output | whole, all at once | yes |

`orca` is Yu et al., Orca, OSDI 2022. `slots` models servers with one contiguous cache per request. `prefill-first` is
vLLM before chunked prefill (Kwon et al., SOSP 2023). `dynamic` is the dynamic batching of general model servers.
`static` is a loop around a `generate` call. Each is implemented as well as its definition allows: tokens are returned
as they are computed, a sequence that ends early releases its blocks, a static batch starts with the sequences that are
waiting instead of holding the last few back, and no padding exceeds the rectangle of its step.

The token budget of a step holds for all disciplines, padding included, since an executor's buffers have that size. A
prompt is computed whole if the budget holds it; only a longer one is split.

No discipline starves a sequence. Sequences join in the policy's order, and running ones advance in every step. The
exception is `prefill-first`, whose decodes pause while prompts join; each prompt takes a slot, and decodes resume once
no slot or no block is left.
"""
