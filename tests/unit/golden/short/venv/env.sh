export HF_HOME=/cache/huggingface
export OMP_NUM_THREADS=4
