"""Models: sizes, and how their parts travel as vectors."""

import subprocess
import sys

import pytest
import torch
from launching import environment
from tiny import batchnorm_model, tiny_model, train_round
from torch import nn

from fedapa_mpi import cli, config, models, parties, training
from fedapa_mpi.data.federation import Shard
from fedapa_mpi.parties import Shape

FEATURES = {"lenet5": 84, "mlp": 32, "cnn4": 512, "resnet18": 512}


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "extractor", "head"),
    [
        # conv 6 (25 c + 1), conv 16 (150 + 1) = 2416, fc 120 (16 s s + 1), fc 84 * 121 = 10164
        ("lenet5", (1, 28, 28), 10, 156 + 2416 + 120 * 257 + 10164, 85 * 10),
        ("lenet5", (3, 32, 32), 10, 456 + 2416 + 120 * 401 + 10164, 85 * 10),
        ("lenet5", (3, 32, 32), 100, 61156, 8500),
        ("lenet5", (1, 16, 16), 2, 156 + 2416 + 120 * 17 + 10164, 85 * 2),
        ("cnn4", (1, 28, 28), 10, 576896, 5130),
        ("cnn4", (3, 32, 32), 10, 873408, 5130),
        ("cnn4", (3, 32, 32), 100, 873408, 51300),
        # torchvision's 11 689 512, without 513 * 1000 for fc, with 3 * 3 instead of 7 * 7
        ("resnet18", (3, 32, 32), 10, 11689512 - 513000 - 3 * 40 * 64, 513 * 10),
        ("resnet18", (1, 8, 9), 2, 11689512 - 513000 - (3 * 49 - 9) * 64, 513 * 2),
        ("mlp", (64,), 10, 65 * 64 + 65 * 32, 33 * 10),
        ("mlp", (1, 8, 8), 3, 65 * 64 + 65 * 32, 33 * 3),
    ],
)
def test_sizes(name, shape, classes, extractor, head):
    model = models.build(name, shape, classes).eval()
    assert (count(model.extractor), count(model.head)) == (extractor, head)
    x = torch.randn(5, *shape)
    assert model(x).shape == (5, classes)
    features = model.extractor(x)
    assert features.shape == (5, FEATURES[name])
    assert (features >= 0).all()  # taken after the last ReLU
    assert torch.equal(model.head(features), model(x))


def test_published_sizes():
    assert count(models.lenet5((1, 28, 28), 10).extractor) == 43576
    assert count(models.lenet5((3, 32, 32), 10).extractor) == 61156


@pytest.mark.parametrize("shape", [(64,), (8, 8), (1, 15, 28), (1, 28, 15), (2, 1, 28, 28)])
@pytest.mark.parametrize("name", ["lenet5", "cnn4"])
def test_lenet5_and_cnn4_need_images(name, shape):
    with pytest.raises(ValueError, match=rf"{name} needs images .* 16 x 16, .* use --model mlp"):
        models.build(name, shape, 10)


@pytest.mark.parametrize("shape", [(64,), (32, 32), (3, 7, 8), (2, 3, 32, 32)])
def test_resnet18_needs_images(shape):
    with pytest.raises(ValueError, match=r"resnet18 needs images .* 8 x 8, .* use --model mlp"):
        models.build("resnet18", shape, 10)


def test_resnet18_keeps_small_images_large():
    extractor = models.resnet18((3, 32, 32), 10).extractor
    x = extractor.maxpool(extractor.conv1(torch.zeros(2, 3, 32, 32)))
    assert x.shape == (2, 64, 32, 32)  # torchvision's own would have 8 x 8 left
    assert extractor.layer4(extractor.layer3(extractor.layer2(x))).shape == (2, 512, 4, 4)


def test_torchvision_is_imported_for_resnet18_only():
    program = (
        "import sys; from fedapa_mpi import leading, models; models.check('cnn4', (1, 28, 28), 10);"
        "assert 'torchvision' not in sys.modules; models.check('resnet18', (1, 28, 28), 10)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=environment())


def test_resnet18_trains_by_fedapa():
    argv = "fedapa --model resnet18 --clients 2 --join_low 1 --batch_size 2 --epochs 1 --lr 0.001"
    shape, members = Shape(10, (3, 32, 32), 2), {}
    run = cli.resolve(cli.Request("fedapa", tuple(argv.split()[1:])))
    server = parties.make_server(run, shape)
    for i in range(2):
        draw = torch.Generator().manual_seed(i)
        x = torch.randint(256, (3, 3, 32, 32), generator=draw, dtype=torch.uint8)
        own = Shard(x, torch.tensor([i, 4, 9]), x[:1], torch.tensor([i]), 10, 255, (0.5,), (0.5,))
        members[i] = parties.make_client(run, shape, i, own, torch.device("cpu"), lambda: None)
    server.welcome({i: client.hello() for i, client in members.items()})
    for t in (1, 2):
        train_round(server, members, [0, 1], t)
    P = 11168832
    assert models.outgoing(members[0].model.extractor, "theta")["theta"].shape == (P,)
    assert server.theta.shape == (2, P)
    assert not torch.equal(server.theta[0], server.theta[1])
    for party in (server, *members.values()):
        assert all(tensor.isfinite().all() for tensor in party.state_dict().values())
    assert training.evaluate(members[1])[..., 1].tolist() == [1]
    assert members[0].model.extractor.bn1.num_batches_tracked.item() == 2  # 2 rounds, 1 batch of 2


def test_the_configuration_knows_every_model():
    assert set(config.MODELS) == set(models.BUILDERS)


@pytest.mark.parametrize("make", [tiny_model, batchnorm_model])
def test_a_part_travels_as_a_vector(make):
    torch.manual_seed(0)
    source, target = make(), make()
    source.train()
    source(torch.randn(8, 4))
    vector = models.vector(source)
    assert vector.tolist() == [v for p in source.parameters() for v in p.flatten().tolist()]
    assert not vector.requires_grad
    models.install(target, "w", models.outgoing(source, "w"))
    for (name, a), (_, b) in zip(source.named_parameters(), target.named_parameters()):
        assert torch.equal(a, b), name
        assert b.requires_grad
    for (name, a), (_, b) in zip(source.named_buffers(), target.named_buffers()):
        assert torch.equal(a, b) == a.is_floating_point(), name


def test_vectors_are_copies():
    model = batchnorm_model()
    message = models.outgoing(model, "theta")
    kept = {name: tensor.clone() for name, tensor in message.items()}
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(9)
    assert all(torch.equal(message[name], kept[name]) for name in kept)
    models.install(model, "theta", message)
    for tensor in message.values():
        tensor.fill_(9)
    assert torch.equal(models.vector(model), kept["theta"])
    assert torch.equal(models.buffers(model), kept["theta_buffers"])


def test_a_model_without_buffers_sends_none():
    assert models.outgoing(tiny_model(), "w").keys() == {"w"}
    assert models.outgoing(batchnorm_model(), "w").keys() == {"w", "w_buffers"}
    assert models.buffers(tiny_model()).shape == (0,)


def test_counters_do_not_travel():
    batchnorm = nn.BatchNorm1d(3)
    batchnorm.num_batches_tracked.fill_(7)
    statistics = models.buffers(batchnorm)
    assert statistics.tolist() == [0, 0, 0, 1, 1, 1]
    models.set_buffers(batchnorm, statistics + 5)
    assert batchnorm.num_batches_tracked.item() == 7
    assert batchnorm.running_mean.tolist() == [5, 5, 5]


@pytest.mark.parametrize("length", [42, 44])
def test_vectors_of_another_length_are_refused(length):
    model = tiny_model()
    before = models.vector(model)
    with pytest.raises(ValueError, match=f"{length} values came for a model part of 43"):
        models.set_vector(model, torch.zeros(length))
    assert torch.equal(models.vector(model), before)


def test_batchnorm_is_found_at_any_depth():
    assert models.has_batchnorm(batchnorm_model())
    assert models.has_batchnorm(nn.Sequential(nn.Sequential(nn.BatchNorm2d(3))))
    assert not models.has_batchnorm(tiny_model())
    assert not models.has_batchnorm(nn.Sequential(nn.LayerNorm(3)))


@pytest.mark.parametrize(
    ("head", "D"),
    [
        (nn.Linear(5, 3), 5),
        (nn.Sequential(nn.BatchNorm1d(7), nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 3)), 7),
    ],
)
def test_feature_size(head, D):
    assert models.feature_size(models.SplitModel(nn.Identity(), head)) == D


def test_feature_size_of_a_head_that_does_not_tell():
    with pytest.raises(ValueError, match=r"the head, a Identity, has no weight matrix"):
        models.feature_size(models.SplitModel(nn.Linear(2, 3), nn.Identity()))
