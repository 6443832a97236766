import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.SparkSession;

/** Prints the rows that Spark finds for each query: arguments are the catalog's URI, its warehouse, and the queries. */
public class ReadTable {
  public static void main(String[] arguments) {
    String catalog = "spark.sql.catalog.compacted";
    SparkSession spark = SparkSession.builder()
        .master("local[1]")
        .config("spark.ui.enabled", "false")
        .config(catalog, "org.apache.iceberg.spark.SparkCatalog")
        .config(catalog + ".type", "jdbc")
        .config(catalog + ".uri", arguments[0])
        .config(catalog + ".warehouse", arguments[1])
        .config(catalog + ".jdbc.schema-version", "V1")
        .getOrCreate();
    for (String query : Arrays.copyOfRange(arguments, 2, arguments.length)) {
      List<String> lines = new ArrayList<>();
      for (Row row : spark.sql(query).collectAsList()) {
        lines.add(row.getString(0));
      }
      System.out.println("rows " + String.join(" ", lines));
    }
    spark.stop();
  }
}
