"""Plain sampling, which verification must equal; written with the functions of the operators' bodies."""

from deepinfer.ops.sampling import _process, _sampled, token_logprobs


def process_logits(logits, rows, bias=None, mask=None):
    """The target distribution of every row, as logits."""
    return _process(logits, rows, bias, mask)


def sample(logits, rows, positions, bias=None, mask=None):
    """One token for each row, and its raw log-probability."""
    ids = _sampled(logits, rows, positions, bias, mask)
    return ids, token_logprobs.reference(logits, ids)
