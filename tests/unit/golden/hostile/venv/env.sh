export QUOTES='it'"'"'s "quoted" `id` $(id) ${HOME} \ back\'
export LINES='first
USER root
- evil: true'
export NUMBER=1e3
export OCTAL=0o17
export TRUTH=yes
export NOTE=' # no comment'
# API_TOKEN is taken from secret:canary/token: set it before the start
# OTHER_TOKEN is taken from env:OTHER_TOKEN: set it before the start
