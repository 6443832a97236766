#!/usr/bin/env bash
# Iceberg's connector for Flink, iceberg-flink-runtime-2.1 1.11.0: a column of Iceberg's type `time` is read in milliseconds, and is of type TIME(0).
#
# Input: a Parquet file with 23:59:59.999999, written by Iceberg's own generic writer.
# Expected: that time in microseconds, or an error. Iceberg's specification, "Primitive Types": time, "Time of day, microsecond precision".
# Seen: 86399999, which is 23:59:59.999, in a column that Flink is told to have whole seconds.
# Cause: Flink holds times of day as an int of milliseconds (RowData), and TypeToFlinkType makes a TimeType without a precision, which is 0.
# Needs: Java 17, Maven; it downloads 150 MB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

dependency() { echo "<dependency><groupId>$1</groupId><artifactId>${2%@*}</artifactId><version>${2#*@}</version></dependency>"; }
cat > "$folder/pom.xml" <<XML
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion><groupId>finding</groupId><artifactId>finding</artifactId><version>1</version><packaging>pom</packaging>
  <dependencies>
    $(dependency org.apache.iceberg iceberg-flink-runtime-2.1@1.11.0)
    $(dependency org.apache.flink flink-core@2.1.1)
    $(dependency org.apache.flink flink-table-runtime@2.1.1)
    $(dependency org.apache.hadoop hadoop-client-runtime@3.4.2)
    $(dependency org.slf4j slf4j-nop@1.7.36)
  </dependencies>
</project>
XML
mvn -q -B -f "$folder/pom.xml" -Dmaven.repo.local="$folder/jars" dependency:build-classpath -Dmdep.outputFile="$folder/class-path"

cat > "$folder/ReadTime.java" <<'JAVA'
import java.time.LocalTime;
import org.apache.flink.table.data.RowData;
import org.apache.iceberg.Schema;
import org.apache.iceberg.data.GenericRecord;
import org.apache.iceberg.data.parquet.GenericParquetWriter;
import org.apache.iceberg.flink.FlinkSchemaUtil;
import org.apache.iceberg.flink.data.FlinkParquetReaders;
import org.apache.iceberg.inmemory.InMemoryOutputFile;
import org.apache.iceberg.io.CloseableIterable;
import org.apache.iceberg.io.FileAppender;
import org.apache.iceberg.parquet.Parquet;
import org.apache.iceberg.types.Types;

public class ReadTime {
    public static void main(String[] args) throws Exception {
        Schema schema = new Schema(Types.NestedField.required(1, "clock", Types.TimeType.get()));
        System.out.println(FlinkSchemaUtil.convert(schema));
        InMemoryOutputFile file = new InMemoryOutputFile();
        try (FileAppender<GenericRecord> out = Parquet.write(file).schema(schema).createWriterFunc(GenericParquetWriter::create).build()) {
            GenericRecord row = GenericRecord.create(schema);
            row.setField("clock", LocalTime.of(23, 59, 59, 999_999_000));
            out.add(row);
        }
        Parquet.ReadBuilder reader = Parquet.read(file.toInputFile()).project(schema);
        try (CloseableIterable<RowData> rows = reader.createReaderFunc(type -> FlinkParquetReaders.buildReader(schema, type)).build()) {
            rows.forEach(row -> System.out.println(row.getInt(0)));
        }
    }
}
JAVA

expected='ROW<`clock` TIME(0) NOT NULL>
86399999'
seen=$(java -cp "$(cat "$folder/class-path")" "$folder/ReadTime.java" 2>/dev/null)
echo "$seen"
[ "$seen" = "$expected" ] || { echo "changed: this was seen before: $expected"; exit 1; }
