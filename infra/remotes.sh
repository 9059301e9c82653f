#!/bin/sh
# A DVC remote, written to .dvc/config (its name) and .dvc/config.local (keys, and this machine's way to it; not in git).
#   infra/remotes.sh s3 s3://dvc/project http://127.0.0.1:9000     keys from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY
#   infra/remotes.sh ssh ssh://user@host/srv/dvc
#   infra/remotes.sh folder /mnt/shared/dvc
set -eu
kind=${1:?give s3, ssh or folder} address=${2:?give the address}
case $kind in
  s3)
    dvc remote add --force --default storage "$address"
    [ -z "${3:-}" ] || dvc remote modify --local storage endpointurl "$3" # machines may reach it by other names
    dvc remote modify --local storage access_key_id "${AWS_ACCESS_KEY_ID:?set it}"
    dvc remote modify --local storage secret_access_key "${AWS_SECRET_ACCESS_KEY:?set it}"
    ;;
  ssh | folder) dvc remote add --force --default storage "$address" ;;
  *) echo "infra/remotes.sh: $kind is none of s3, ssh, folder" >&2; exit 2 ;;
esac
