#!/bin/sh
# What Spark on Kubernetes starts in the pods of its driver and its executors; everything else is a command of tiered-compactor.
set -eu
case "${1:-}" in
driver)
    shift
    set -- "$SPARK_HOME/bin/spark-submit" --conf "spark.driver.bindAddress=$SPARK_DRIVER_BIND_ADDRESS" --deploy-mode client "$@"
    ;;
executor)
    # Options of the JVM come numbered, and may hold spaces: in argument files of java's own they keep them.
    options=$(mktemp)
    env | grep '^SPARK_JAVA_OPT_' | sort -t_ -k4 -n | sed -e 's/^[^=]*=//' -e 's/[\\"]/\\&/g' -e 's/.*/"&"/' >"$options" || true
    set -- "$JAVA_HOME/bin/java" "@$options" "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" \
        -cp "${SPARK_CONF_DIR:-$SPARK_HOME/conf}:$SPARK_HOME/jars/*" org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
        --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" --cores "$SPARK_EXECUTOR_CORES" \
        --app-id "$SPARK_APPLICATION_ID" --hostname "$SPARK_EXECUTOR_POD_IP" \
        --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" --podName "$SPARK_EXECUTOR_POD_NAME"
    ;;
spark-submit) ;;
*)
    set -- tiered-compactor "$@"
    ;;
esac
exec tini -s -- "$@"
