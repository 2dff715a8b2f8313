"""What is wrong with a federation file: every fault, with client, split and field."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import h5py
import numpy as np

from fedapa_mpi.data.fedfile import FORMAT, SPLITS, FederationFile, hdf5, name_of, not_finite

SHOWN = 3  # faults that an error message of a run tells


def refuse_faulty(path: str) -> None:
    """Look a file over without reading the samples themselves.

    Raises ValueError with the first faults, and as `fedfile.hdf5`.
    """
    with hdf5(path) as h5:
        found = list(islice(faults(h5), SHOWN + 1))
    if found:
        more = "; ..." if len(found) > SHOWN else ""
        raise ValueError(
            f"{path} is not a federation that can be used: {'; '.join(found[:SHOWN])}{more}. "
            f"All faults: python -m fedapa_mpi.data validate {path}"
        )


def all_faults(path: str) -> list[str]:
    """Every fault, what is in the samples included. Raises as `fedfile.hdf5`."""
    with hdf5(path) as h5:
        found = list(faults(h5))
        if not found:
            found += _changed(FederationFile(h5, path))
        return found + list(_not_finite(h5))


def faults(h5: h5py.File) -> Iterator[str]:
    """Faults of the attributes, of the numbering, and of each client's datasets and labels."""
    yield from _root_faults(h5)
    clients = h5.get("clients")
    if not isinstance(clients, h5py.Group) or not len(clients):
        yield "there is no client: expected groups /clients/0000, /clients/0001, ..."
        return
    yield from _numbering_faults(clients, h5.attrs.get("clients"))
    classes, shape = _integer(h5.attrs.get("classes")), _shape(h5.attrs.get("input_shape"))
    samples = 0
    for client, group in _numbered(clients):
        for split in SPLITS:
            yield from _split_faults(f"client {client}, {split}", group, split, classes, shape)
        samples += _training_samples(group)
    if not samples:
        yield "no client has a training sample"


def _root_faults(h5: h5py.File) -> Iterator[str]:
    attributes = h5.attrs
    if _integer(attributes.get("format")) != FORMAT:
        yield f"attribute format is {_text(attributes.get('format'))}, expected {FORMAT}"
    classes, shape = _integer(attributes.get("classes")), _shape(attributes.get("input_shape"))
    if classes is None or classes < 1:
        yield f"attribute classes is {_text(attributes.get('classes'))}, expected a number above 0"
    if shape is None:
        yield (
            f"attribute input_shape is {_text(attributes.get('input_shape'))}, expected the shape "
            "of one sample, for example [1, 28, 28]"
        )
    yield from _normalisation_faults(attributes, shape)
    names = np.atleast_1d(attributes.get("class_names", []))
    if len(names) not in (0, classes):
        yield f"attribute class_names has {len(names)} names for {classes} classes"
    if "groups" in h5:
        yield from _group_faults(h5["groups"], h5.get("clients", ()))


def _normalisation_faults(attributes: Any, shape: tuple[int, ...] | None) -> Iterator[str]:
    moments = {}
    for name, default in (("scale", 1.0), ("mean", 0.0), ("std", 1.0)):
        values = np.atleast_1d(attributes.get(name, default))
        moments[name] = len(values)
        good = values.dtype.kind in "fiu" and values.ndim == 1 and np.isfinite(values).all()
        if not good or (name != "mean" and not values.all()):
            wanted = "numbers" if name == "mean" else "numbers other than 0"
            yield f"attribute {name} is {_text(attributes.get(name))}, expected {wanted}"
    channels = shape[0] if shape else 1
    if moments["scale"] != 1:
        yield f"attribute scale has {moments['scale']} numbers, expected one"
    if moments["mean"] != moments["std"] or moments["mean"] not in (1, channels):
        yield (
            f"attributes mean and std have {moments['mean']} and {moments['std']} numbers, "
            f"expected one of each or {channels} (one per channel)"
        )


def _group_faults(groups: Any, clients: Any) -> Iterator[str]:
    good = isinstance(groups, h5py.Dataset) and groups.dtype.kind in "iu"
    if not good or groups.shape != (len(clients),):
        yield f"/groups is {_text(groups)}, expected one integer for each of {len(clients)} clients"


def _numbering_faults(clients: h5py.Group, promised: Any) -> Iterator[str]:
    numbers = [client for client, _ in _numbered(clients)]
    known = {name_of(client) for client in numbers}
    for name in clients:
        if name not in known:
            yield f"/clients/{name} is not the name of a client: expected 0000, 0001, ..."
    count = max([_integer(promised) or 0, *(client + 1 for client in numbers)])
    for client in sorted(set(range(count)) - set(numbers)):
        yield f"client {client}: there is no /clients/{name_of(client)}"
    if promised is not None and _integer(promised) != count:
        yield f"attribute clients is {_text(promised)}, but there is a client {count - 1}"


def _numbered(clients: h5py.Group) -> Iterator[tuple[int, Any]]:
    """The clients whose group is named as expected, ascending."""
    names = (n for n in clients if n.isascii() and n.isdecimal() and n == name_of(int(n)))
    return ((client, clients.get(name_of(client))) for client in sorted(map(int, names)))


def _split_faults(
    where: str, client: Any, split: str, classes: int | None, shape: tuple[int, ...] | None
) -> Iterator[str]:
    group = client.get(split) if isinstance(client, h5py.Group) else None
    found = {f: group.get(f) if isinstance(group, h5py.Group) else None for f in ("x", "y")}
    for field, dataset in found.items():
        if not isinstance(dataset, h5py.Dataset):
            yield f"{where}/{field}: there is no such dataset"
        elif field == "x":
            yield from _sample_faults(f"{where}/x", dataset, shape)
        else:
            yield from _label_faults(f"{where}/y", dataset, classes)
    lengths = [d.shape[0] for d in found.values() if isinstance(d, h5py.Dataset) and d.shape]
    if len(lengths) == 2 and lengths[0] != lengths[1]:
        yield f"{where}/y: {lengths[1]} labels for {lengths[0]} samples in x"


def _sample_faults(where: str, x: h5py.Dataset, shape: tuple[int, ...] | None) -> Iterator[str]:
    if x.dtype.name not in ("uint8", "float32"):
        yield f"{where}: dtype {x.dtype}, expected uint8 or float32"
    if not x.shape or (shape is not None and x.shape[1:] != shape):
        wanted = "..." if shape is None else ", ".join(map(str, shape))
        yield f"{where}: shape {list(x.shape or ())}, expected [samples, {wanted}]"


def _label_faults(where: str, y: h5py.Dataset, classes: int | None) -> Iterator[str]:
    if y.dtype.kind not in "iu":
        yield f"{where}: dtype {y.dtype}, expected integers"
    if len(y.shape or ()) != 1:
        yield f"{where}: shape {list(y.shape or ())}, expected [samples]"
    elif y.dtype.kind in "iu" and classes is not None:
        labels = y[:]
        wrong = np.flatnonzero((labels < 0) | (labels >= classes))
        if wrong.size:
            yield (
                f"{where}: {wrong.size} of {labels.size} labels are out of range, first "
                f"{labels[wrong[0]]} of sample {wrong[0]}, expected 0 to {classes - 1}"
            )


def _training_samples(client: Any) -> int:
    labels = client.get("train/y") if isinstance(client, h5py.Group) else None
    return labels.size or 0 if isinstance(labels, h5py.Dataset) else 0


def _not_finite(h5: h5py.File) -> Iterator[str]:
    """Clients with NaN or infinity among their samples."""
    clients = h5.get("clients")
    for client, group in _numbered(clients) if isinstance(clients, h5py.Group) else ():
        for split in SPLITS:
            x = group.get(f"{split}/x") if isinstance(group, h5py.Group) else None
            if not isinstance(x, h5py.Dataset) or x.dtype.kind != "f" or not x.size:
                continue
            wrong = not_finite(np.asarray(x[()]))
            if wrong.size:
                sample = wrong[0] // (x.size // x.shape[0]) if x.shape else 0
                yield (
                    f"client {client}, {split}/x: {wrong.size} of {x.size} values are NaN or "
                    f"infinite, first in sample {sample}"
                )


def _changed(file: FederationFile) -> list[str]:
    """Clients that are not what their hash says; only in a file of good structure."""
    return [
        f"client {i}: the content is not what attribute sha256 says"
        for i in range(len(file))
        if file.changed(i, file.arrays(i))
    ]


def _integer(value: Any) -> int | None:
    return int(value) if isinstance(value, int | np.integer) else None


def _shape(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    sizes = np.atleast_1d(value)
    good = sizes.dtype.kind in "iu" and sizes.ndim == 1 and (sizes > 0).all()
    return tuple(int(size) for size in sizes) if good else None


def _text(value: Any) -> str:
    if value is None:
        return "missing"
    if isinstance(value, h5py.Dataset):
        return f"{value.dtype} {list(value.shape or ())}"
    return str(value.tolist() if isinstance(value, np.ndarray | np.generic) else value)
