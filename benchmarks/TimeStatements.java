import com.sun.management.OperatingSystemMXBean;
import java.lang.management.ManagementFactory;
import java.util.Arrays;
import java.util.List;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.SparkSession;

/**
 * Runs SQL statements and prints a line for each: seconds, CPU seconds of this process, and the first column of the first row.
 * Arguments: the URI of an Iceberg catalog, its warehouse, and the statements.
 */
public class TimeStatements {
  public static void main(String[] arguments) {
    String catalog = "spark.sql.catalog.compacted";
    SparkSession spark = SparkSession.builder()
        .master("local[2]")
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
    for (String statement : Arrays.copyOfRange(arguments, 2, arguments.length)) {
      long cpu = machine.getProcessCpuTime();
      long begin = System.nanoTime();
      List<Row> rows = spark.sql(statement).collectAsList();
      double seconds = (System.nanoTime() - begin) / 1e9;
      String first = rows.isEmpty() || rows.get(0).size() == 0 ? "" : String.valueOf(rows.get(0).get(0));
      System.out.println(String.format("timed %.3f %.3f %s", seconds, (machine.getProcessCpuTime() - cpu) / 1e9, first));
    }
    spark.stop();
  }
}
