# Completion of phalanx in bash: source <(phalanx completion bash)
_phalanx_completion() {
    local IFS=$'\n' line="${COMP_LINE:0:COMP_POINT}" breaks="${COMP_WORDBREAKS//[^=:]/}" begun="" reply
    local word="${line##*[[:space:]]}"
    # bash parts words at = and :, and the program does not: it gets the line as typed, and what stands before the last of
    # them is cut off its answers.
    [[ -n $breaks ]] && begun="${word%"${word##*[$breaks]}"}"
    COMPREPLY=()
    for reply in $(_PHALANX_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args \
        _TYPER_COMPLETE_ARGS="$line" "$1" 2>/dev/null); do
        reply="${reply%%$'\t'*}"
        COMPREPLY+=("${reply#"$begun"}")
    done
    # A value follows.
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
    return 0
}
complete -o default -F _phalanx_completion phalanx
