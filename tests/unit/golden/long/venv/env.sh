export TOKENIZERS_PARALLELISM=false
export PYTHONPATH=/workspace
# WANDB_API_KEY is taken from secret:wandb-secret/api-key: set it before the start
