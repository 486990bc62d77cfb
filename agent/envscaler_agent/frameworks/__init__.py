"""A :class:`~envscaler_agent.Session` in the words of the frameworks that people train with.

One module for each, imported by the training code alone: :mod:`.torch`, :mod:`.transformers`,
:mod:`.lightning`, :mod:`.keras`, :mod:`.accelerate`, and :mod:`.noise` for gradient noise. They are
copied into images with the agent, run on Python 3.8 and import nothing of ours but the agent.
"""
