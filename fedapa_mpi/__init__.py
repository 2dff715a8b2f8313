"""FedAPA and its competitors over MPI."""

__version__ = "0.1.0"
