"""The trainers people use: Lightning, Accelerate and the Trainer of transformers.

Each module is imported by whoever needs it (``from tiltsam.integrations.lightning import SharpnessAwareMixin``), needs
its package installed, and is imported by nothing else of tiltsam. Two of them share one idea, which is in
:mod:`tiltsam.integrations.gathering`: tiltsam makes the gradient, and the trainer does with it and the base optimizer
what it always does.
"""
