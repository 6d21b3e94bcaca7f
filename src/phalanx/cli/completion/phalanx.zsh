#compdef phalanx
# Completion of phalanx in zsh: source <(phalanx completion zsh) behind compinit, or as a file _phalanx in a folder of fpath
_phalanx() {
    local -a replies open whole
    replies=("${(@f)$(_PHALANX_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args \
        _TYPER_COMPLETE_ARGS="${(j: :)words[1,CURRENT-1]} $PREFIX" phalanx 2>/dev/null)}")
    replies=(${replies%%$'\t'*})
    if (( ! $#replies )); then
        _files
        return
    fi
    # A value follows those that end with =.
    open=(${(M)replies:#*=}) whole=(${replies:#*=})
    (( $#open )) && compadd -S '' -a open
    (( $#whole )) && compadd -a whole
}
if [[ $funcstack[1] == _phalanx ]]; then
    _phalanx "$@"
else
    compdef _phalanx phalanx
fi
