import com.sun.management.OperatingSystemMXBean;
import java.lang.management.ManagementFactory;
import java.util.Arrays;
import java.util.List;
import java.util.stream.Collectors;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.SparkSession;

/**
 * Runs SQL statements and prints a line for each: seconds, CPU seconds of this process, and the first column of the rows, separated by
 * spaces. Arguments: the URI of an Iceberg catalog, its warehouse, the number of threads, and the statements.
 */
public class RunStatements {
  public static void main(String[] arguments) {
    String catalog = "spark.sql.catalog.compacted";
    SparkSession spark = SparkSession.builder()
        .master("local[" + arguments[2] + "]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.sql.extensions", "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions")
        .config(catalog, "org.apache.iceberg.spark.SparkCatalog")
        .config(catalog + ".type", "jdbc")
        .config(catalog + ".uri", arguments[0])
        .config(catalog + ".warehouse", arguments[1])
        .config(catalog + ".jdbc.schema-version", "V1")
        .getOrCreate();
    OperatingSystemMXBean machine = (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
    for (String statement : Arrays.copyOfRange(arguments, 3, arguments.length)) {
      long cpu = machine.getProcessCpuTime();
      long begin = System.nanoTime();
      List<Row> rows = spark.sql(statement).collectAsList();
      double seconds = (System.nanoTime() - begin) / 1e9;
      double used = (machine.getProcessCpuTime() - cpu) / 1e9;
      String first = rows.stream().filter(row -> row.size() > 0).map(row -> String.valueOf(row.get(0))).collect(Collectors.joining(" "));
      System.out.println(String.format("done %.3f %.3f %s", seconds, used, first));
    }
    spark.stop();
  }
}
