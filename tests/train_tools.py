"""Helpers that the tests of training share."""

from mpic_lab.train.batch import hidden_rows


def hidden_states(model, batch):
    """Returns last hidden states [B, tokens, hidden] under the batch's attention."""
    return hidden_rows(model, batch)[batch.where]
