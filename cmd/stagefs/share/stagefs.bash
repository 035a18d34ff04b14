# bash completion for stagefs

_stagefs() {
	local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}
	local commands='mount umount locks why release break doctor version help'
	local command= word options= i
	for ((i = 1; i < COMP_CWORD; i++)); do
		word=${COMP_WORDS[i]}
		if [[ " $commands " == *" $word "* ]]; then
			command=$word
			break
		fi
	done
	COMPREPLY=()
	case $prev in
	--unlocked)
		mapfile -t COMPREPLY < <(compgen -W 'allow deny' -- "$cur")
		return ;;
	--owner)
		mapfile -t COMPREPLY < <(compgen -W 'process group session cgroup' -- "$cur")
		return ;;
	--enforce)
		mapfile -t COMPREPLY < <(compgen -W 'all observe' -- "$cur")
		return ;;
	--state-dir)
		compopt -o filenames
		mapfile -t COMPREPLY < <(compgen -d -- "$cur")
		return ;;
	--log)
		compopt -o filenames
		mapfile -t COMPREPLY < <(compgen -f -- "$cur")
		return ;;
	--lock-name | --candidate | --depth | --grace | --why)
		return ;;
	esac
	case $command in
	'' | help)
		mapfile -t COMPREPLY < <(compgen -W "$commands --help --version" -- "$cur")
		return ;;
	mount) options='--lock-name --shared-name --candidate --depth --owner --unlocked --enforce --disable-locking --state-dir --strict --grace --no-passthrough --compat --debug --daemon --supervise --log' ;;
	umount) options='--lazy' ;;
	locks) options='--json --watch' ;;
	break) options='--why' ;;
	doctor) options='--json --state-dir' ;;
	esac
	if [[ $cur == -* ]]; then
		mapfile -t COMPREPLY < <(compgen -W "$options --help" -- "$cur")
	elif [[ $command != version ]]; then
		compopt -o filenames
		if [[ $command == why ]]; then
			mapfile -t COMPREPLY < <(compgen -f -- "$cur")
		else
			mapfile -t COMPREPLY < <(compgen -d -- "$cur")
		fi
	fi
}
complete -F _stagefs stagefs
