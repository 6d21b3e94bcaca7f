# Completion of phalanx in fish: phalanx completion fish | source
function __phalanx_complete
    set -l line (commandline -cp)
    set -l replies (env _PHALANX_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args \
        _TYPER_COMPLETE_ARGS="$line" phalanx 2>/dev/null)
    if string length --quiet -- $replies
        printf '%s\n' $replies
    else
        __fish_complete_path (commandline -ct)
    end
end
complete --command phalanx --no-files --arguments '(__phalanx_complete)'
