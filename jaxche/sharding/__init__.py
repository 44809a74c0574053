"""Layer 2, places: where parameters, gradients and optimizer state live on a mesh, and the step that keeps them so."""

from jaxche.sharding._loss import Loss, as_loss, batch_size

__all__ = ["Loss", "as_loss", "batch_size"]
