import type { Invocation } from "./command.ts";

/** The one candidate where local paths are wanted: shells know best how to complete and quote those. */
export const LOCAL_PATHS = ":paths";

/*
 * The scripts only register a function. Whenever a word is to be completed it runs this executable again
 * (`COMPLETE=<shell> aenv -- WORD...`, the last word being the one under the cursor), which prints a line per
 * candidate: the word, for zsh and fish followed by a tab and a description. So a script stays valid when
 * the executable is replaced.
 */

// Bash breaks words at ":" and "=", too, and replaces only what is behind them. Nothing here needs more than
// version 3.2, which macOS has.
const BASH = `_aenv() {
    local rest=$COMP_LINE i word count=0 prefix candidate
    local words=() program=aenv
    [[ \${COMP_WORDS[0]##*/} == agentenv ]] && program=agentenv
    COMPREPLY=()
    for ((i = 0; i <= COMP_CWORD; i++)); do
        word=\${COMP_WORDS[i]}
        if ((i == 0)) || [[ $rest == [[:space:]]* ]]; then
            rest=\${rest#"\${rest%%[![:space:]]*}"}
            words[count]=$word
            count=$((count + 1))
        else
            words[count - 1]=\${words[count - 1]}$word
        fi
        rest=\${rest#"$word"}
    done
    word=\${words[count - 1]}
    prefix=
    if [[ $word == *[:=]* && $COMP_WORDBREAKS == *:* && $COMP_WORDBREAKS == *=* ]]; then
        prefix=\${word%"\${word##*[:=]}"}
    fi
    while IFS= read -r candidate; do
        if [[ $candidate == ${LOCAL_PATHS} ]]; then
            compopt -o default 2>/dev/null ||
                while IFS= read -r candidate; do COMPREPLY[\${#COMPREPLY[@]}]=$candidate; done < <(compgen -f -- "$word")
            return
        fi
        COMPREPLY[\${#COMPREPLY[@]}]=\${candidate#"$prefix"}
    done < <(COMPLETE=bash command "$program" -- "\${words[@]}" 2>/dev/null)
}
complete -F _aenv aenv agentenv
`;

const ZSH = `#compdef aenv agentenv
_aenv() {
    local line program=aenv
    [[ \${words[1]:t} == agentenv ]] && program=agentenv
    local -a candidates
    for line in "\${(@f)$(COMPLETE=zsh command $program -- "\${(@)words[1,CURRENT]}" 2>/dev/null)}"; do
        [[ -n $line ]] || continue
        [[ $line == ${LOCAL_PATHS} ]] && { _files; return; }
        candidates+=("\${\${line%%$'\\t'*}//:/\\\\:}:\${line#*$'\\t'}")
    done
    (( \${#candidates} )) && _describe -V aenv candidates
}
if [[ $funcstack[1] == _aenv ]]; then
    _aenv "$@"
else
    compdef _aenv aenv agentenv
fi
`;

const FISH = `function __aenv_complete
    set -l program aenv
    string match -qr '(^|/)agentenv$' -- (commandline --current-process --tokenize --cut-at-cursor)[1]
    and set program agentenv
    set -l rows (COMPLETE=fish command $program -- (commandline --current-process --tokenize --cut-at-cursor) (commandline --current-token --cut-at-cursor) 2>/dev/null)
    if test "$rows" = ${LOCAL_PATHS}
        __fish_complete_path (commandline --current-token --cut-at-cursor)
    else if test (count $rows) -gt 0
        printf '%s\\n' $rows
    end
end
complete --command aenv --command agentenv --no-files --keep-order --arguments '(__aenv_complete)'
`;

const SCRIPTS = { bash: BASH, zsh: ZSH, fish: FISH } as const;

export const SHELLS = ["bash", "zsh", "fish"] as const satisfies readonly (keyof typeof SCRIPTS)[];

/** `aenv completion`. */
export async function printCompletion({ args }: Invocation): Promise<number> {
  process.stdout.write(SCRIPTS[args[0] as keyof typeof SCRIPTS]);
  return 0;
}
