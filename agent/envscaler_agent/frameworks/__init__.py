"""A :class:`~envscaler_agent.Session` for each of the common training frameworks.

Each has a module, which only the training code imports: :mod:`.torch`, :mod:`.transformers`,
:mod:`.lightning`, :mod:`.keras`, :mod:`.accelerate`, and :mod:`.noise` for gradient noise. They are copied
into images with the agent, run on Python 3.8 and import nothing of this project except the agent.
"""

ONE_TRAINING = (
    "a SessionCallback carries one training: steps of a second one could not be distinguished "
    "from the first's; make it a stage of its own"
)
"""Why a callback refuses a second training."""
