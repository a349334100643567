"""Lightning, Accelerate and the Trainer of transformers.

Import the module you need (``from tiltsam.integrations.lightning import SharpnessAwareMixin``); each needs its package
installed. tiltsam computes the gradient (:meth:`tiltsam.SharpnessAware.compute_gradient`), and the trainer clips,
logs and steps the base optimizer as it always does.
"""
