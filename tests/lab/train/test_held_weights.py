"""Held weights: training moves none of the entries, and all of the others."""

import pytest
import torch

from mpic_lab.generator import Generator
from mpic_lab.generator.tokenizer import build_tokenizer
from mpic_lab.generator.worlds import SECOND as WORLD
from mpic_lab.train.batch import answer_loss, collate
from mpic_lab.train.generations import FIRST, SECOND
from mpic_lab.train.held import HeldWeights
from mpic_lab.train.model import build_model
from mpic_lab.train.optim import Optimizers
from mpic_lab.train.sink_weights import SINK, held_circuits

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def trained():
    """A freshly initialised model after two steps of training with held sinks, and its weights before."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, design=SECOND.design)
    SECOND.init(model, tokenizer, 0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers = Optimizers.of_language(model, 0.02, 2e-3)
    optimizers.held = HeldWeights(held_circuits(model))
    example = SECOND.encoder(tokenizer)(Generator(1, "train", world=WORLD).task("card", 1))
    for _ in range(2):
        answer_loss(model, collate([example])).backward()
        optimizers.step(1.0)
    return model, before


def test_held_entries_are_bit_identical_after_training(trained):
    model, before = trained
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter, index in held_circuits(model):
        assert torch.equal(parameter[index], before[names[id(parameter)]][index]), names[id(parameter)]


def test_the_other_entries_of_the_same_matrices_are_trained(trained):
    model, before = trained
    layer = model.model.language_model.layers[4]
    moved = layer.self_attn.k_proj.weight != before["model.language_model.layers.4.self_attn.k_proj.weight"]
    assert moved[:, SINK + 1 :].float().mean() > 0.9 and not moved[:, SINK].any()


def test_the_first_generation_holds_nothing():
    assert FIRST.held(torch.nn.Module()) == []


def test_held_entries_do_not_share_in_an_orthogonalised_update():
    matrix = torch.nn.Parameter(torch.eye(8))
    optimizers = Optimizers([matrix], [([torch.nn.Parameter(torch.ones(2))], 1.0)], 0.1, 0.1)
    optimizers.held = HeldWeights([(matrix, 0)])
    gradient = torch.zeros(8, 8)
    gradient[0], gradient[1, 3] = 1e6, 1.0
    matrix.grad, optimizers.clipped[0].grad = gradient, torch.ones(2)
    optimizers.step(1.0)
    moved = (matrix - torch.eye(8)).abs()
    assert moved[0].max() == 0
    assert moved[1, 3] > 0.05, "the whole update goes to the only entry that may move"
