#!/bin/bash
# Starts a Slurm of two nodes on this host, as root, for faults_under_slurm.py and tune_slurm.py; kills what it started at the end.
#
#     apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge
#     bash benchmarks/one_host_slurm.sh FOLDER COMMAND...
#
# ROOT=DIR takes the packages from below DIR, where `dpkg -x` unpacked them, and installs nothing. COMMAND finds slurm.conf
# by SLURM_CONF; beside it, `mend-NODE` starts the daemon of a node again.
set -euo pipefail
folder=$(realpath -m "$1"); shift
root=${ROOT:-} here=$(hostname) libraries=${ROOT:-}/usr/lib/x86_64-linux-gnu
mkdir -p "$folder"/{state,log}
export SLURM_CONF=$folder/slurm.conf PATH=$root/usr/bin:$root/usr/sbin:$PATH
if [ -n "$root" ]; then export LD_LIBRARY_PATH=$libraries:$libraries/slurm-wlm; fi
find_program() { command -v "$1-wlm" || command -v "$1"; }
cat > "$SLURM_CONF" <<CONF
ClusterName=here
SlurmctldHost=$here
SlurmctldPort=26817
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
PluginDir=$libraries/slurm-wlm
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=30
KillWait=20
MinJobAge=3600
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
NodeName=$here NodeHostname=$here NodeAddr=127.0.0.1 Port=26821 CPUs=2 State=UNKNOWN
NodeName=localhost NodeHostname=$here NodeAddr=127.0.0.1 Port=26822 CPUs=2 State=UNKNOWN
PartitionName=debug Nodes=$here,localhost Default=YES MaxTime=INFINITE State=UP
CONF
(umask 077; [ -e "$folder/munge.key" ] || head -c 1024 /dev/urandom > "$folder/munge.key")
for node in "$here" localhost; do
    mkdir -p "$folder/spool-$node"
    printf '#!/bin/bash\nexec %s -N %s -d %s\n' "$(find_program slurmd)" "$node" "$(find_program slurmstepd)" > "$folder/mend-$node"
    chmod +x "$folder/mend-$node"
done
stop_all() {
    for file in "$folder"/slurmd-*.pid "$folder/slurmctld.pid" "$folder/munged.pid"; do
        [ ! -e "$file" ] || kill "$(cat "$file")" 2>/dev/null || true
    done
}
trap stop_all EXIT
munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
    --log-file="$folder/log/munged.log" --seed-file="$folder/munged.seed"
"$(find_program slurmctld)"
for node in "$here" localhost; do "$folder/mend-$node"; done
for _ in $(seq 60); do
    [ "$(sinfo --noheader --states=idle --format=%D || true)" != 2 ] || break
    sleep 1
done
"$@"
