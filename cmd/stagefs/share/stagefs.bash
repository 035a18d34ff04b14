# bash completion for stagefs

_stagefs() {
	local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} before=
	# --option=value is one word or three, as COMP_WORDBREAKS says.
	if [[ $cur == = ]]; then
		cur=
	elif [[ $prev == = ]]; then
		prev=${COMP_WORDS[COMP_CWORD-2]}
	elif [[ $cur == --*=* ]]; then
		prev=${cur%%=*} cur=${cur#*=} before=$prev=
	fi
	local commands='mount umount unmount run acquire renew check wait release break quarantine locks why events doctor version help'
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
		mapfile -t COMPREPLY < <(compgen -P "$before" -W 'allow deny' -- "$cur")
		return ;;
	--owner)
		mapfile -t COMPREPLY < <(compgen -P "$before" -W 'process group session cgroup' -- "$cur")
		return ;;
	--enforce)
		mapfile -t COMPREPLY < <(compgen -P "$before" -W 'all observe' -- "$cur")
		return ;;
	--transport)
		mapfile -t COMPREPLY < <(compgen -P "$before" -W 'auto uring threads fuse' -- "$cur")
		return ;;
	--state-dir)
		compopt -o filenames
		mapfile -t COMPREPLY < <(compgen -P "$before" -d -- "$cur")
		return ;;
	--on-crash)
		mapfile -t COMPREPLY < <(compgen -P "$before" -W 'keep destroy quarantine' -- "$cur")
		return ;;
	--log | --client-file)
		compopt -o filenames
		mapfile -t COMPREPLY < <(compgen -P "$before" -f -- "$cur")
		return ;;
	--lock-name | --shared-name | --candidate | --depth | --grace | --options | -o | --why | --client | --ttl | --restore | --delete | --delete-older | --conflict-exit-code | -E | --kill-after | --wait)
		return ;;
	-w)
		[[ $command == locks ]] || return ;; # --watch takes no value
	esac
	case $command in
	'' | help)
		mapfile -t COMPREPLY < <(compgen -W "$commands --help --version" -- "$cur")
		return ;;
	mount) options='--lock-name --shared-name --candidate --depth --owner --unlocked --enforce --disable-locking --on-crash --state-dir --strict --grace --options --no-passthrough --idmap --transport --compat --debug --daemon --supervise --replace --log' ;;
	umount | unmount) options='--lazy' ;;
	run)
		options='--nonblock --wait --conflict-exit-code --shared --why --create-once --destroy-on-failure --on-crash --owner --client --client-file --ttl --kill-after'
		# What follows the directory is a command line of its own.
		local at=$((i + 1))
		while ((at < COMP_CWORD)) && [[ ${COMP_WORDS[at]} == -* && ${COMP_WORDS[at]} != -- ]]; do
			if [[ ${COMP_WORDS[at+1]} == = ]]; then
				((at++))
			fi
			[[ ${COMP_WORDS[at]} == = || " --wait -w --conflict-exit-code -E --why --on-crash --owner --client --client-file --ttl --kill-after " == *" ${COMP_WORDS[at]} "* ]] && ((at++))
			((at++))
		done
		[[ ${COMP_WORDS[at]} == -- ]] && ((at < COMP_CWORD)) && ((at++))
		if ((at < COMP_CWORD)); then
			((at++))
			[[ ${COMP_WORDS[at]} == -- ]] && ((at < COMP_CWORD)) && ((at++))
			if ((at == COMP_CWORD)); then
				mapfile -t COMPREPLY < <(compgen -c -- "$cur")
			else
				compopt -o filenames
				mapfile -t COMPREPLY < <(compgen -f -- "$cur")
			fi
			return
		fi ;;
	acquire) options='--nonblock --wait --shared --why --on-crash --owner --client --client-file --ttl --json' ;;
	renew) options='--client --client-file --ttl --json' ;;
	check) options='--client --client-file --json' ;;
	wait) options='--wait' ;;
	release) options='--client --client-file --destroy --failed' ;;
	events) options='--json' ;;
	locks) options='--json --watch' ;;
	break) options='--why' ;;
	quarantine) options='--json --restore --delete --delete-older' ;;
	doctor) options='--json --state-dir' ;;
	version) options='--handover' ;;
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
